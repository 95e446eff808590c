"""Prometheus metrics in a registry of their own. Updated once per request or step, never per token.

What vLLM measures too has vLLM's name and labels under a prefix that the configuration chooses, older names of the
same fact beside it, so that dashboards keep working; what only treadle has begins with ``treadle:``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from treadle.runtime.request import Stats
from treadle.serve.engine_metrics import EngineMetrics
from treadle.serve.rate import Rate

REASONS = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
COUNTS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(kw_only=True)
class Times:
    """When one answer passed its stages: seconds on the clock of time.monotonic, 0 for what has not happened."""

    arrival_s: float
    queue_s: float = 0.0
    """seconds between arrival and the first step"""
    first_s: float = 0.0
    last_s: float = 0.0


class Metrics:
    """Everything /metrics shows: counters and histograms of this process, and the step loop's latest Stats."""

    def __init__(
        self,
        stats: Callable[[], Stats],
        model: str,
        *,
        prefix: str = "vllm:",
        cache_info: Mapping[str, str] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._prefix = prefix
        finished = Counter(
            f"{prefix}request_success",
            "Requests by how they ended",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(model, reason) for reason in REASONS}
        self.refused = self._counter("treadle:requests_refused", "Requests refused because the queue was full")
        self._prompt_tokens = self._counter(f"{prefix}prompt_tokens", "Prompt tokens of started requests")
        self._cached_tokens = self._counter(f"{prefix}prompt_tokens_cached", "Prompt tokens found in the cache")
        sources = Counter(
            f"{prefix}prompt_tokens_by_source",
            "Prompt tokens by where their state came from",
            ("model_name", "source"),
            registry=self.registry,
        )
        self._sources = {source: sources.labels(model, source) for source in SOURCES}
        self._generation_tokens = self._counter(f"{prefix}generation_tokens", "Tokens generated")
        self._ttft_s = self._seconds("time_to_first_token_seconds", "Arrival to first token")
        self._itl_s = [
            self._seconds("inter_token_latency_seconds", "Between a request's steps that gave tokens"),
            self._seconds("time_per_output_token_seconds", "Older name of inter_token_latency_seconds"),
        ]
        self._tpot_s = self._seconds(
            "request_time_per_output_token_seconds", "First token to last, for each token but the first"
        )
        self._e2e_s = self._seconds("e2e_request_latency_seconds", "Arrival to last token")
        self._queue_s = self._seconds("request_queue_time_seconds", "Arrival to first step")
        self._prefill_s = self._seconds("request_prefill_time_seconds", "First step to first token")
        self._decode_s = self._seconds("request_decode_time_seconds", "First token to last")
        self._inference_s = self._seconds("request_inference_time_seconds", "First step to last token")
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._computed_lengths = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached", TOKENS
        )
        self._answer_lengths = self._histogram("request_generation_tokens", "Tokens of an answer", TOKENS)
        self._asked_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", TOKENS)
        self._asked_answers = self._histogram("request_params_n", "Answers that a request asked for", COUNTS)
        self._prompt_rate, self._generation_rate = Rate(), Rate()
        rates = {
            "avg_prompt_throughput_toks_per_s": self._prompt_rate.value,
            "avg_generation_throughput_toks_per_s": self._generation_rate.value,
        }
        self.registry.register(EngineMetrics(stats, rates, model, prefix=prefix, cache_info=cache_info or {}))

    def submitted(self, num_answers: int, max_tokens: int) -> None:
        """Count a request by what it asks for."""
        self._asked_answers.observe(num_answers)
        self._asked_tokens.observe(max_tokens)

    def first_tokens(
        self, times: Times, prompt_tokens: int, cached_tokens: int, num_tokens: int, *, external_tokens: int = 0
    ) -> None:
        """Count the start of an answer; a prompt that several answers share is counted by one of them.

        ``external_tokens`` of the cached ones came from a tier below the device.
        """
        if prompt_tokens:
            self._prompt_tokens.inc(prompt_tokens)
            self._prompt_rate.add(prompt_tokens)
            self._prompt_lengths.observe(prompt_tokens)
            self._cached_tokens.inc(cached_tokens)
            computed = max(prompt_tokens - cached_tokens, 0)
            self._computed_lengths.observe(computed)
            for source, count in zip(SOURCES, (computed, cached_tokens - external_tokens, external_tokens)):
                self._sources[source].inc(count)
        self._queue_s.observe(times.queue_s)
        self._ttft_s.observe(times.first_s - times.arrival_s)
        self._prefill_s.observe(max(times.first_s - times.arrival_s - times.queue_s, 0.0))
        self._count_tokens(num_tokens)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        """Count tokens that came ``seconds`` after the ones before."""
        for histogram in self._itl_s:
            histogram.observe(seconds)
        self._count_tokens(num_tokens)

    def finish(self, reason: str, times: Times, end_s: float, num_tokens: int) -> None:
        """Count an answer of ``num_tokens`` that ended."""
        self._finished[reason].inc()
        self._e2e_s.observe(end_s - times.arrival_s)
        if num_tokens:
            self._answer_lengths.observe(num_tokens)
            self._decode_s.observe(times.last_s - times.first_s)
            self._inference_s.observe(max(times.last_s - times.arrival_s - times.queue_s, 0.0))
        if num_tokens > 1:
            self._tpot_s.observe((times.last_s - times.first_s) / (num_tokens - 1))

    def render(self) -> bytes:
        """Return the text exposition format."""
        return generate_latest(self.registry)

    def _count_tokens(self, count: int) -> None:
        self._generation_tokens.inc(count)
        self._generation_rate.add(count)

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(name, doc, ("model_name",), registry=self.registry).labels(self._model)

    def _seconds(self, name: str, doc: str) -> Histogram:
        return self._histogram(name, doc, SECONDS)

    def _histogram(self, name: str, doc: str, buckets: Sequence[float]) -> Histogram:
        full = f"{self._prefix}{name}"
        return Histogram(full, doc, ("model_name",), buckets=buckets, registry=self.registry).labels(self._model)
