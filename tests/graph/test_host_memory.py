from __future__ import annotations

import pytest

from treadle.conf.connector import MOONCAKE_CLIENT_BYTES
from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.graph import host_memory, resolve
from treadle.graph.host_memory import BUFFER_BYTES
from treadle.graph.resolve import Resolved, refuse_elsewhere

GIB = 1 << 30
CPU = ["hardware=cpu", "hardware.memory=64GiB"]
GPU = ["hardware.device=cuda", "hardware.memory=80GiB"]


def resolved(*overrides: str) -> Resolved:
    return resolve.resolve(compose(["model=llama3-8b", "model.weights=dummy", "model.max_len=2048", *overrides]))


def host(plan_of: Resolved) -> list[tuple[str, int]]:
    return [(row.item, row.nbytes) for row in plan_of.plan.host]


def test_nothing_is_taken_unless_something_leaves_the_device() -> None:
    plan = resolved(*CPU)
    assert plan.deployment.kv.host_memory is None
    assert [row for row in plan.plan.rows if row.kind == "host"] == []


def test_on_a_cpu_the_arena_and_the_pool_share_one_memory() -> None:
    without, plan = resolved(*CPU).plan, resolved(*CPU, "kv.host_memory=60GiB", "hardware.memory=90GiB").plan
    assert [row.nbytes for row in plan.rows if row.kind == "host"] == [60 * GIB]
    assert plan.host == ()
    assert plan.total_bytes - plan.arena_bytes == without.total_bytes - without.arena_bytes + 60 * GIB
    with pytest.raises(ConfigError) as refusal:
        resolved(*CPU, "kv.host_memory=60GiB")
    assert str(refusal.value).startswith("kv.host_memory=60.00 GiB: leaves too little for the model")
    fits = refusal.value.nearest[0]
    assert resolved(*CPU, fits).plan.full_sequences >= 1


def test_on_a_gpu_it_is_beside_the_devices_memory() -> None:
    plan = resolved(*GPU, "kv.host_memory=8GiB", "kv.connectors=[{name:mooncake,memory:2GiB}]")
    lent = ("mooncake: what it lends, and its process", 2 * GIB + MOONCAKE_CLIENT_BYTES)
    assert host(plan) == [("state that left the device", 8 * GIB), lent]
    assert plan.plan.arena_bytes == resolved(*GPU).plan.arena_bytes


def test_a_disk_or_connector_brings_a_buffer_and_a_share_is_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.machine, "memory_bytes", lambda: 100 * GIB)
    for override in "kv.disk.path=relative", "kv.connectors=[{name:peer}]":
        plan = resolved(*GPU, override)
        assert plan.deployment.kv.host_memory == str(BUFFER_BYTES)
    assert host(resolved(*GPU, "kv.host_memory=25%"))[0][1] == 25 * GIB
    path = resolved(*GPU, "kv.disk.path=relative").deployment.kv.disk.path
    assert path is not None
    assert path.startswith("/")


def test_a_pool_that_holds_no_few_objects_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"kv\.host_memory=1\.00 MiB: a page or block of this model takes 2\.00 MiB"
    ) as refusal:
        resolved(*GPU, "kv.host_memory=1MiB")
    assert resolved(*GPU, refusal.value.nearest[0]).plan.host[0].nbytes < 9 << 20


def test_a_machine_with_less_memory_refuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolved(*GPU, "kv.host_memory=64GiB")
    device = resolve.machine.CudaDevice(name="g", memory_bytes=80 * GIB, capability="sm_90")
    monkeypatch.setattr(resolve.machine, "cuda_device", lambda: device)
    monkeypatch.setattr(resolve.machine, "memory_bytes", lambda: 32 * GIB)
    with pytest.raises(
        ConfigError, match=r"kv\.host_memory: the plan takes 64\.00 GiB of main memory, this machine has 32"
    ):
        refuse_elsewhere(plan)
