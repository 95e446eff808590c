from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, generate_latest

from treadle.runtime.request import HINTS, MISS_REASONS, PREEMPTED, RECOMPUTE_CAUSES, KindStats, Metric, Stats
from treadle.serve.engine_metrics import EngineMetrics

STATE = {
    "prefix_missed_tokens": {"cold": 5, "evicted": 6},
    "external_query_tokens": 40,
    "external_hit_tokens": 30,
    "preempted": {"moved": 2},
    "recomputed_tokens": {"evicted": 7},
    "state_kinds": {
        "full": KindStats(planned_bytes=1, used_bytes=2, cached_bytes=3, free_bytes=4, available_bytes=5),
        "block": KindStats(used_bytes=6),
    },
    "arena_bytes": 1 << 20,
    "free_slab_bytes": 1 << 19,
    "stranded_bytes": 11,
    "evacuated_bytes": 12,
    "fragmentation": 0.25,
    "checkpoints": 13,
    "checkpoint_bytes": 14,
    "sessions_pinned": 15,
    "pinned_bytes": 16,
    "tiers": [
        Metric("kv_offload_load_bytes", "Bytes copied to the device", "counter", 17),
        Metric("kv_offload_objects", "Objects in a tier", "gauge", 18, {"tier": "host"}),
        Metric("kv_offload_objects", "Objects in a tier", "gauge", 19, {"tier": "disk"}),
    ],
}
"""what the engine says of its state memory"""
EXPECTED = """
vllm:external_prefix_cache_queries_total 40
vllm:external_prefix_cache_hits_total 30
vllm:kv_offload_load_bytes_total 17
vllm:kv_offload_objects{tier="host"} 18
vllm:kv_offload_objects{tier="disk"} 19
treadle:prefix_missed_tokens_total{reason="cold"} 5
treadle:prefix_missed_tokens_total{reason="evicted"} 6
treadle:prefix_missed_tokens_total{reason="below_granularity"} 0
treadle:preemptions_total{state="kept"} 0
treadle:preemptions_total{state="moved"} 2
treadle:recomputed_tokens_total{cause="failed"} 0
treadle:recomputed_tokens_total{cause="evicted"} 7
treadle:state_planned_bytes{kind="full"} 1
treadle:state_used_bytes{kind="full"} 2
treadle:state_used_bytes{kind="block"} 6
treadle:state_cached_bytes{kind="full"} 3
treadle:state_free_bytes{kind="full"} 4
treadle:state_available_bytes{kind="full"} 5
treadle:arena_bytes 1048576
treadle:arena_free_slab_bytes 524288
treadle:arena_stranded_bytes 11
treadle:arena_evacuated_bytes_total 12
treadle:arena_fragmentation 0.25
treadle:checkpoints 13
treadle:checkpoint_bytes 14
treadle:sessions_pinned 15
treadle:pinned_bytes 16
treadle:session_hints_total{hint="demote"} 21
"""


def exposition(stats: Stats) -> str:
    """Return /metrics of an engine, each line without the label that all have."""
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: stats, {}, "m", prefix="vllm:", cache_info={}))
    text = generate_latest(registry).decode()
    assert len(re.findall('^[^#].*model_name="m"', text, re.MULTILINE)) == len(re.findall("^[^#]", text, re.MULTILINE))
    return re.sub(r',?model_name="m"|(?<=\{)model_name="m",', "", text).replace("{}", "").replace("{,", "{")


def test_every_number_has_its_name_type_and_labels():
    text = exposition(Stats(session_hints={"demote": 21}, **STATE))
    lines = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    for line in EXPECTED.strip().splitlines():
        name, _, value = line.rpartition(" ")
        assert lines[name] == float(value), name
        kind = "counter" if re.match(r"[^{]*_total\b", name) else "gauge"
        assert f"# TYPE {name.partition('{')[0]} {kind}\n" in text


def test_what_is_known_to_happen_is_counted_from_0():
    text = exposition(Stats())
    for name, label, values in (
        ("prefix_missed_tokens", "reason", MISS_REASONS),
        ("preemptions", "state", PREEMPTED),
        ("recomputed_tokens", "cause", RECOMPUTE_CAUSES),
        ("session_hints", "hint", HINTS),
    ):
        for value in values:
            assert f'treadle:{name}_total{{{label}="{value}"}} 0.0' in text
