"""What /metrics shows of state memory: bytes by kind, the prefix cache, preemptions, sessions and the tiers below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from treadle.runtime.request import (
    HINTS,
    MISS_REASONS,
    PREEMPTED,
    RECOMPUTE_CAUSES,
    KindStats,
    Stats,
)
from treadle.runtime.request import Metric as Number

KIND_BYTES = {
    "planned": "What the memory plan set aside for a kind of state",
    "used": "What requests hold of a kind of state",
    "cached": "What is kept of a kind of state for later requests, and given away when memory is needed",
    "free": "What nobody holds in the slabs of a kind of state",
    "available": "What a kind of state could be given in all",
}
"""fields of KindStats, without their ``_bytes``"""


class StateMetrics:
    """Makes metric families of Stats."""

    def __init__(self, model: str, *, prefix: str) -> None:
        self._model = model
        self._prefix = prefix

    def collect(self, stats: Stats) -> Iterator[Metric]:
        """Yield what vLLM has too, under its names, then what only treadle has."""
        yield from self._prefix_cache(stats)
        yield from self._tiers(stats.tiers)
        yield from self._arena(stats)
        yield from self._kinds(stats.state_kinds)
        doc = "Requests put back in the queue, by what became of their state"
        yield self._by("treadle:preemptions", doc, "state", stats.preempted, PREEMPTED)
        doc = "Tokens of preempted requests that were computed again, by cause"
        yield self._by("treadle:recomputed_tokens", doc, "cause", stats.recomputed_tokens, RECOMPUTE_CAUSES)
        yield self._gauge(
            "treadle:sessions_pinned", "Sessions whose state is kept on the device", stats.sessions_pinned
        )
        yield self._gauge("treadle:pinned_bytes", "What pinned sessions hold of the device", stats.pinned_bytes)
        doc = "Hints of sessions that were followed"
        yield self._by("treadle:session_hints", doc, "hint", stats.session_hints, HINTS)

    def _prefix_cache(self, stats: Stats) -> Iterator[Metric]:
        prefix = self._prefix
        doc = "Prompt tokens that were not on the device and were looked for in the tiers"
        yield self._count(f"{prefix}external_prefix_cache_queries", doc, stats.external_query_tokens)
        yield self._count(f"{prefix}external_prefix_cache_hits", "Those that were found", stats.external_hit_tokens)
        doc = "Prompt tokens that did not come from the prefix cache, by reason"
        yield self._by("treadle:prefix_missed_tokens", doc, "reason", stats.prefix_missed_tokens, MISS_REASONS)
        yield self._gauge(
            "treadle:checkpoints", "Places of recurrent and windowed state to go on from", stats.checkpoints
        )
        yield self._gauge("treadle:checkpoint_bytes", "What they hold of the device", stats.checkpoint_bytes)

    def _tiers(self, numbers: Iterable[Number]) -> Iterator[Metric]:
        """Yield the tiers' own numbers; those of one name are one family."""
        families: dict[str, Metric] = {}
        for number in numbers:
            name, labels = f"{self._prefix}{number.name}", {"model_name": self._model, **number.labels}
            if name not in families:
                kind = CounterMetricFamily if number.kind == "counter" else GaugeMetricFamily
                families[name] = kind(name, number.doc)
            families[name].add_sample(name + "_total" * (number.kind == "counter"), labels, number.value)
        yield from families.values()

    def _arena(self, stats: Stats) -> Iterator[Metric]:
        doc = "Device memory for state of every kind"
        yield self._gauge("treadle:arena_bytes", doc, stats.arena_bytes)
        yield self._gauge("treadle:arena_free_slab_bytes", "What no kind of state has of it", stats.free_slab_bytes)
        doc = "Unused bytes that no request of any kind can be given"
        yield self._gauge("treadle:arena_stranded_bytes", doc, stats.stranded_bytes)
        doc = "Share of the unused bytes that only evacuation makes another kind's"
        yield self._gauge("treadle:arena_fragmentation", doc, stats.fragmentation)
        doc = "What was moved on the device so that another kind could have its slab"
        yield self._count("treadle:arena_evacuated_bytes", doc, stats.evacuated_bytes)

    def _kinds(self, kinds: Mapping[str, KindStats]) -> Iterator[Metric]:
        for field, doc in KIND_BYTES.items():
            family = GaugeMetricFamily(f"treadle:state_{field}_bytes", doc, labels=("model_name", "kind"))
            for name, kind in kinds.items():
                family.add_metric((self._model, name), getattr(kind, f"{field}_bytes"))
            yield family

    def _by(self, name: str, doc: str, label: str, found: Mapping[str, int], known: Iterable[str] = ()) -> Metric:
        """Return a counter for each value of a label; those that are known begin at 0."""
        family = CounterMetricFamily(name, doc, labels=("model_name", label))
        for value, count in (dict.fromkeys(known, 0) | dict(found)).items():
            family.add_metric((self._model, value), count)
        return family

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _count(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
