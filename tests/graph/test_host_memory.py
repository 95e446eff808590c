from __future__ import annotations

import pytest

from treadle.conf.connector import MOONCAKE_CLIENT_BYTES
from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.size import format_bytes
from treadle.graph import machine, resolve
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
    left = format_bytes(without.free_bytes)
    assert str(refusal.value).startswith(f"kv.host_memory=60.00 GiB: the model leaves {left} of 64.00 GiB")
    fits = resolved(*CPU, refusal.value.nearest[0]).plan
    assert fits.full_sequences >= 1
    assert fits.memory_bytes - fits.total_bytes > GIB, "it does not take the last byte either"


def test_on_a_gpu_it_is_beside_the_devices_memory() -> None:
    plan = resolved(*GPU, "kv.host_memory=8GiB", "kv.connectors=[{name:mooncake,memory:2GiB}]")
    lent = ("mooncake: what it lends, and its process", 2 * GIB + MOONCAKE_CLIENT_BYTES)
    assert host(plan) == [("state that left the device", 8 * GIB), lent]
    assert plan.plan.arena_bytes == resolved(*GPU).plan.arena_bytes


def test_a_disk_or_connector_brings_a_buffer_and_a_share_is_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 100 * GIB)
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


@pytest.mark.parametrize("host", ["64GiB", "31.5GiB", "100%"])
def test_on_a_cpu_something_is_left_for_the_system(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 32 * GIB)
    words = ("model=qwen3-0.6b", "hardware=cpu")
    with pytest.raises(ConfigError, match=r"kv\.host_memory=.*: the model leaves .* of 30\.50 GiB") as refusal:
        resolved(*words, f"kv.host_memory={host}")
    found = resolved(*words, refusal.value.nearest[0])
    assert found.plan.max_len == 2048
    assert found.plan.total_bytes < 30.5 * GIB
    monkeypatch.setattr(machine, "available_bytes", lambda: 31 * GIB)
    refuse_elsewhere(found)


def test_what_connectors_lend_is_not_said_to_be_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv\.connectors: they take 64\.12 GiB: the model leaves"):
        resolved(*CPU, "kv.host_memory=1GiB", "kv.connectors=[{name:mooncake,memory:64GiB}]")
    with pytest.raises(ConfigError, match=r"kv\.host_memory=60\.00 GiB") as refusal:
        resolved(*CPU, "kv.host_memory=60GiB", "kv.connectors=[{name:mooncake,memory:2GiB}]")
    resolved(*CPU, refusal.value.nearest[0], "kv.connectors=[{name:mooncake,memory:2GiB}]")


def test_a_pool_is_to_blame_before_the_number_of_sequences() -> None:
    bare = resolved(*CPU).plan
    others = bare.total_bytes - bare.arena_bytes
    with pytest.raises(ConfigError, match=r"kv\.host_memory="):
        resolved(*CPU, f"kv.host_memory={64 * GIB - others - 40 * (1 << 20)}")


def test_a_model_that_does_not_fit_is_not_told_of_the_pool() -> None:
    needs = r"hardware\.memory=8\.00 GiB: the model does not fit .* one token alone needs 15\.46 GiB"
    for overrides in [], ["kv.host_memory=4GiB"]:
        with pytest.raises(ConfigError, match=needs):
            resolved("hardware=cpu", "hardware.memory=8GiB", *overrides)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB in a machine of 32, of which 20 are free."""
    device = machine.CudaDevice(name="g", memory_bytes=80 * GIB, capability="sm_90")
    monkeypatch.setattr(machine, "cuda_device", lambda: device)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 32 * GIB)
    monkeypatch.setattr(machine, "available_bytes", lambda: 20 * GIB)


@pytest.mark.usefixtures("gpu")
def test_beside_a_gpu_the_engine_and_the_system_need_some_too() -> None:
    problem = r"kv\.host_memory=30\.00 GiB: this machine has 28\.50 GiB for it beside the system and the engine"
    with pytest.raises(ConfigError, match=problem) as refusal:
        resolved("hardware=cuda", "kv.host_memory=30GiB")
    assert refusal.value.nearest == ("kv.host_memory=28.5GiB",)
    plan = resolved("hardware=cuda", *refusal.value.nearest)
    with pytest.raises(
        ConfigError, match=r"=28\.50 GiB: 19\.75 GiB of main memory are free now, and .* 2\.00 "
    ) as refusal:
        refuse_elsewhere(plan)
    refuse_elsewhere(resolved("hardware=cuda", *refusal.value.nearest))
    # A plan for another machine says nothing of this one's main memory, until it is run.
    elsewhere = resolved("hardware=h200", "kv.host_memory=64GiB", "hardware.memory=70GiB")
    with pytest.raises(ConfigError, match=r"kv\.host_memory=64\.00 GiB: this machine has 28\.50 GiB"):
        refuse_elsewhere(elsewhere)


def test_on_a_cpu_what_other_programs_take_counts_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(machine, "available_bytes", lambda: 32 * GIB)
    plan = resolved("hardware=cpu", "kv.host_memory=24GiB", "kv.memory=4GiB")
    with pytest.raises(
        ConfigError, match=r"31\.75 GiB of main memory are free now, and the engine needs 15"
    ) as refusal:
        refuse_elsewhere(plan)
    fits = resolved("hardware=cpu", "kv.memory=4GiB", refusal.value.nearest[0])
    refuse_elsewhere(fits)
    assert fits.plan.total_bytes <= 31.75 * GIB
    refuse_elsewhere(resolved("hardware=cpu"))
    monkeypatch.setattr(machine, "available_bytes", lambda: 8 * GIB)
    refuse_elsewhere(resolved("hardware=cpu"))
    with pytest.raises(ConfigError, match=r"did you mean kv\.host_memory=null"):
        refuse_elsewhere(plan)
