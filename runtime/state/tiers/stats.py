"""What the tiers did and hold, as data, under the names that monitoring knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from treadle.runtime.state.tiers.lane import CallStats, Lane
from treadle.runtime.state.tiers.ticket import Where

if TYPE_CHECKING:
    from treadle.runtime.state.tiers.host import HostPool
    from treadle.runtime.state.tiers.loads import Loads


@dataclass(frozen=True)
class Metric:
    """One number: its name without a prefix, what it means, its kind in Prometheus, its labels."""

    name: str
    doc: str
    kind: str
    """counter or gauge"""
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreStats:
    """A store, seen from here."""

    calls: Mapping[str, CallStats]
    usage: tuple[int, int] | None
    """its bytes and objects, None if it does not tell"""
    is_open: bool
    held_off: bool
    """whether it is left alone with loads or saves for what it did before"""
    opened: int
    """times that a breaker opened"""
    last_error: str


@dataclass
class TierStats:
    """Counts since the start, and what is held now. Objects unless it says bytes."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = 0
    num_objects: int = 0
    evictions: int = 0
    flight_bytes: int = 0
    """bytes of the pool that copies and stores are filling"""
    sunk: int = 0
    sunk_bytes: int = 0
    sinks_refused: int = 0
    lifted: int = 0
    lifted_bytes: int = 0
    host_hits: int = 0
    queries: dict[str, int] = field(default_factory=dict)
    """answers of ``find`` by place; ``none``: no tier was known to have it"""
    stores: dict[str, StoreStats] = field(default_factory=dict)

    def count_queries(self, found: Sequence[Where | None]) -> None:
        """Count answers of ``find``."""
        for where, count in Counter(found).items():
            name = "none" if where is None else where.value
            self.queries[name] = self.queries.get(name, 0) + count

    def complete(self, pool: HostPool, lanes: Mapping[str, Lane], loads: Loads, flight_bytes: int) -> TierStats:
        """Return a copy with what is held now."""
        return replace(
            self,
            capacity_bytes=pool.capacity,
            used_bytes=pool.used_bytes,
            pinned_bytes=pool.pinned_bytes,
            num_objects=len(pool),
            evictions=pool.evictions,
            flight_bytes=flight_bytes + loads.num_bytes,
            queries=dict(self.queries),
            stores={name: _store_stats(lane) for name, lane in lanes.items()},
        )

    def metrics(self) -> Iterator[Metric]:
        """Yield everything as metrics, under vLLM's names where it has them."""
        host = {"tier": "host"}
        yield Metric("kv_offload_cpu_allocation_size", "Bytes of pinned host memory.", "gauge", self.capacity_bytes)
        usage = self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0
        yield Metric("kv_offload_cpu_cache_usage_perc", "Share of host memory in use, 1 is all.", "gauge", usage)
        yield Metric("kv_offload_pinned_bytes", "Bytes kept from eviction on request.", "gauge", self.pinned_bytes)
        yield Metric("kv_offload_flight_bytes", "Bytes being filled now.", "gauge", self.flight_bytes)
        yield Metric("kv_offload_store_bytes", "Bytes copied from the device to the host.", "counter", self.sunk_bytes)
        yield Metric("kv_offload_load_bytes", "Bytes copied from the host to the device.", "counter", self.lifted_bytes)
        yield Metric("kv_offload_stores", "Objects copied from the device to the host.", "counter", self.sunk)
        yield Metric("kv_offload_loads", "Objects copied from the host to the device.", "counter", self.lifted)
        doc = "Objects that found no room on the host."
        yield Metric("kv_offload_allocation_failure", doc, "counter", self.sinks_refused)
        yield Metric("kv_offload_evictions", "Objects evicted from a tier.", "counter", self.evictions, host)
        yield Metric("kv_offload_objects", "Objects in a tier.", "gauge", self.num_objects, host)
        for where, count in sorted(self.queries.items()):
            doc = "Objects looked for, by the nearest tier that had them."
            yield Metric("kv_offload_tiering_block_queries", doc, "counter", count, {"tier": where})
        for name, store in self.stores.items():
            yield from _store_metrics(store, {"tier": name})


def _store_stats(lane: Lane) -> StoreStats:
    return StoreStats(
        calls={call: replace(stats) for call, stats in lane.stats.items()},
        usage=lane.usage(),
        is_open=lane.is_open,
        held_off=lane.held_off("load") or lane.held_off("save"),
        opened=lane.opened,
        last_error=lane.last_error,
    )


def _store_metrics(store: StoreStats, tier: Mapping[str, str]) -> Iterator[Metric]:
    if store.usage is not None:
        yield Metric("kv_offload_objects", "Objects in a tier.", "gauge", store.usage[1], tier)
        yield Metric("kv_offload_tiering_used_bytes", "Bytes in a tier.", "gauge", store.usage[0], tier)
    yield Metric("kv_offload_tiering_up", "Whether the store is ready.", "gauge", float(store.is_open), tier)
    doc = "Whether the store is left alone because it failed."
    yield Metric("kv_offload_tiering_held_off", doc, "gauge", float(store.held_off), tier)
    load, save, lookup = (store.calls[call] for call in ("load", "save", "lookup"))
    yield Metric("kv_offload_tiering_read_bytes", "Bytes loaded.", "counter", load.num_bytes, tier)
    yield Metric("kv_offload_tiering_read_time", "Seconds in loads.", "counter", load.seconds, tier)
    yield Metric("kv_offload_tiering_write_bytes", "Bytes saved.", "counter", save.num_bytes, tier)
    yield Metric("kv_offload_tiering_write_time", "Seconds in saves.", "counter", save.seconds, tier)
    yield Metric("kv_offload_tiering_block_hits", "Objects loaded.", "counter", load.done, tier)
    doc = "Objects asked for that a store did not give."
    yield Metric("kv_offload_tiering_promotion_job_failures", doc, "counter", load.failed, tier)
    doc = "Objects that a store did not take."
    yield Metric("kv_offload_tiering_cascade_job_failures", doc, "counter", save.failed, tier)
    yield Metric("kv_offload_stores_skipped", "Objects not offered to a store.", "counter", save.held_off, tier)
    yield Metric("kv_offload_tiering_lookups", "Objects looked for in a store.", "counter", lookup.keys, tier)
    doc = "Objects whose bytes were not those that were saved."
    yield Metric("kv_offload_tiering_corrupt", doc, "counter", load.corrupt, tier)
    for call, stats in store.calls.items():
        labels = {**tier, "call": call}
        yield Metric("kv_offload_tiering_errors", "Calls that failed.", "counter", stats.errors, labels)
        yield Metric("kv_offload_tiering_timeouts", "Calls that took too long.", "counter", stats.timeouts, labels)
