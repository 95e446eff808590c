"""Prometheus metrics in a registry of their own. Updated once per request or step, never per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from treadle.runtime.request import Stats

REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Everything /metrics shows: counters and histograms of this process, and the step loop's latest Stats."""

    def __init__(self, stats: Callable[[], Stats], model: str) -> None:
        self.registry = CollectorRegistry()
        finished = Counter(
            "treadle:requests", "Requests by how they ended", ("model", "reason"), registry=self.registry
        )
        self._finished = {reason: finished.labels(model, reason) for reason in REASONS}
        self.refused = self._counter("treadle:requests_refused", "Requests refused because the queue was full", model)
        self.prompt_tokens = self._counter("treadle:prompt_tokens", "Prompt tokens of started requests", model)
        self.cached_tokens = self._counter("treadle:prompt_tokens_cached", "Prompt tokens found in the cache", model)
        self.generation_tokens = self._counter("treadle:generation_tokens", "Tokens generated", model)
        self.queue_s = self._histogram("treadle:queue_seconds", "Arrival to first step", model)
        self.ttft_s = self._histogram("treadle:time_to_first_token_seconds", "Arrival to first token", model)
        self.itl_s = self._histogram("treadle:inter_token_latency_seconds", "Between a request's steps", model)
        self.e2e_s = self._histogram("treadle:request_seconds", "Arrival to last token", model)
        self.registry.register(_StatsCollector(stats, model))

    def finish(self, reason: str, seconds: float) -> None:
        """Count a request that ended."""
        self._finished[reason].inc()
        self.e2e_s.observe(seconds)

    def render(self) -> bytes:
        """Return the text exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, doc: str, model: str) -> Counter:
        return Counter(name, doc, ("model",), registry=self.registry).labels(model)

    def _histogram(self, name: str, doc: str, model: str) -> Histogram:
        return Histogram(name, doc, ("model",), buckets=SECONDS, registry=self.registry).labels(model)


class _StatsCollector(Collector):
    """Reads the step loop's Stats when somebody asks."""

    def __init__(self, stats: Callable[[], Stats], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield gauges and counters."""
        stats = self._stats()
        yield self._gauge("treadle:requests_running", "Requests in the batch", stats.num_running)
        yield self._gauge("treadle:requests_waiting", "Requests in the queue", stats.num_waiting)
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("treadle:kv_usage_ratio", "Share of the cache's pages that requests hold", used)
        yield self._count("treadle:preemptions", "Requests put back in the queue", stats.preemptions)
        yield self._count("treadle:steps", "Steps of the loop", stats.steps)
        yield self._count("treadle:computed_tokens", "Tokens fed to the program", stats.computed_tokens)
        yield self._count("treadle:prefix_query_tokens", "Prompt tokens looked up", stats.prefix_query_tokens)
        yield self._count("treadle:prefix_hit_tokens", "Prompt tokens found", stats.prefix_hit_tokens)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=("model",))
        family.add_metric((self._model,), value)
        return family

    def _count(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=("model",))
        family.add_metric((self._model,), value)
        return family
