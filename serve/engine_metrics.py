"""What /metrics shows of the step loop: its latest Stats, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from treadle.runtime.request import STEP_TOKENS, Stats


class EngineMetrics(Collector):
    """Gauges and counters of the step loop, and rates that are known when asked for."""

    def __init__(
        self,
        stats: Callable[[], Stats],
        rates: Mapping[str, Callable[[], float]],
        model: str,
        *,
        prefix: str,
        cache_info: Mapping[str, str],
    ) -> None:
        self._stats = stats
        self._rates = dict(rates)
        self._model = model
        self._prefix = prefix
        self._cache_info = {"model_name": model, **cache_info}

    def collect(self) -> Iterable[Metric]:
        """Yield what vLLM has too, under its names, then what only treadle has."""
        stats, prefix = self._stats(), self._prefix
        yield self._gauge(f"{prefix}num_requests_running", "Requests in the batch", stats.num_running)
        yield self._gauge(f"{prefix}num_requests_waiting", "Requests in the queue", stats.num_waiting)
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge(f"{prefix}kv_cache_usage_perc", "Share of the pages that requests hold; 1 is all", used)
        yield self._gauge(f"{prefix}gpu_cache_usage_perc", "Older name of kv_cache_usage_perc", used)
        yield self._count(f"{prefix}num_preemptions", "Requests put back in the queue", stats.preemptions)
        yield self._count(f"{prefix}prefix_cache_queries", "Prompt tokens looked up", stats.prefix_query_tokens)
        yield self._count(f"{prefix}prefix_cache_hits", "Prompt tokens found", stats.prefix_hit_tokens)
        older = "Older name of prefix_cache_"
        yield self._count(f"{prefix}gpu_prefix_cache_queries", f"{older}queries", stats.prefix_query_tokens)
        yield self._count(f"{prefix}gpu_prefix_cache_hits", f"{older}hits", stats.prefix_hit_tokens)
        for name, rate in self._rates.items():
            yield self._gauge(f"{prefix}{name}", "Tokens a second, over the last seconds", rate())
        yield self._steps(stats)
        info = GaugeMetricFamily(
            f"{prefix}cache_config_info", "How the cache is set up", labels=tuple(self._cache_info)
        )
        info.add_metric(tuple(self._cache_info.values()), 1)
        yield info
        yield self._count("treadle:steps", "Steps of the loop", stats.steps)
        yield self._gauge("treadle:kv_pages", "Pages of the cache", stats.pages_total)
        yield self._gauge("treadle:kv_pages_used", "Pages that requests hold", stats.pages_used)
        doc = "Prompt tokens that were computed, and why none were found"
        yield self._count_by("treadle:prefix_missed_tokens", doc, "reason", stats.prefix_missed_tokens)
        doc = "Tokens computed again after a preemption, and why their state was lost"
        yield self._count_by("treadle:recomputed_tokens", doc, "cause", stats.recomputed_tokens)

    def _steps(self, stats: Stats) -> Metric:
        """Return how many tokens steps computed, prompts and answers together."""
        family = HistogramMetricFamily(
            f"{self._prefix}iteration_tokens_total", "Tokens fed to the program in a step", labels=("model_name",)
        )
        counts = list(accumulate(stats.step_tokens or [0] * (len(STEP_TOKENS) + 1)))
        bounds = [*(f"{float(bound)}" for bound in STEP_TOKENS), "+Inf"]
        family.add_metric((self._model,), list(zip(bounds, map(float, counts))), stats.computed_tokens)
        return family

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _count(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _count_by(self, name: str, doc: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, doc, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family
