from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from tiny_model import write_model

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.lock import from_lock, to_lock
from treadle.conf.size import parse_bytes
from treadle.graph import machine
from treadle.graph.resolve import Resolved, refuse_elsewhere, resolve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(autouse=True)
def bf16_machine(monkeypatch):
    """A machine with 8 GiB, 2 cores and bfloat16 arithmetic, whatever the tests run on."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "cpu_features", lambda: ("avx2", "avx512_bf16"))
    monkeypatch.setattr(machine, "cuda_device", lambda: None)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 80 GiB in that machine."""
    device = machine.CudaDevice("NVIDIA X", 80 << 30, "sm_90")
    monkeypatch.setattr(machine, "cuda_device", lambda: device)
    return device


def resolved(folder, *overrides: str) -> Resolved:
    return resolve(compose(["model=hf", f"model.path='{folder}'", *overrides]))


def refused(folder, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_is_left_to_choose(folder):
    found = resolved(folder)
    model, hardware = found.deployment.model, found.deployment.hardware
    assert (model.family, model.dtype, model.max_len) == ("llama", "float32", 256)
    assert (hardware.device, hardware.threads, hardware.memory) == ("cpu", 2, str(7424 << 20))
    assert hardware.features == ("avx2", "avx512_bf16")
    assert found.deployment.passes.quantize == "none"
    assert found.deployment.passes.compile_cache
    assert int(found.deployment.kv.memory) == found.plan.arena_bytes
    assert found.spec.vocab == 64
    assert "layers.1.mlp.down.weight" in found.checkpoint.weights


def test_resolving_again_changes_nothing(folder):
    once = resolved(folder, "kv.memory=1MiB")
    again = resolve(once.deployment)
    assert again.deployment == once.deployment
    assert again.fingerprint == once.fingerprint
    assert (again.plan.rows, again.plan.num_pages) == (once.plan.rows, once.plan.num_pages)


def test_a_lock_file_starts_the_same_server(folder, tmp_path, monkeypatch):
    once = resolved(folder, "kv.page_tokens=32")
    (tmp_path / "x.lock.yaml").write_text(to_lock(once.deployment))
    monkeypatch.setattr(machine, "memory_bytes", lambda: 4 << 30)
    monkeypatch.setattr(machine, "num_cores", lambda: 1)
    again = resolve(from_lock(tmp_path / "x.lock.yaml"))
    assert again.deployment == once.deployment
    assert again.fingerprint == once.fingerprint


def test_the_fingerprint_follows_the_checkpoint_not_its_place(folder, tmp_path):
    same = write_model(tmp_path / "elsewhere" / folder.name)
    other = write_model(tmp_path / "other" / folder.name, seed=1)
    assert resolved(same).fingerprint == resolved(folder).fingerprint
    assert resolved(other).fingerprint != resolved(folder).fingerprint


def test_a_lock_of_another_checkpoint_is_refused(folder, tmp_path):
    other = write_model(tmp_path / "other", seed=1)
    locked = resolved(folder).deployment
    with pytest.raises(ConfigError, match="another one"):
        resolve(replace(locked, model=replace(locked.model, path=str(other))))


@pytest.mark.parametrize(
    ("stored", "features", "dtype"),
    [
        ("float32", ("avx512_bf16",), "float32"),
        ("bfloat16", ("avx512_bf16",), "bfloat16"),
        ("float16", ("amx_bf16",), "bfloat16"),
        ("bfloat16", ("avx2",), "float32"),
        ("float16", (), "float32"),
    ],
)
def test_auto_dtype_is_what_the_machine_computes_well(tmp_path, monkeypatch, stored, features, dtype):
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    folder = write_model(tmp_path / "m", torch_dtype=stored)
    assert resolved(folder).deployment.model.dtype == dtype
    assert resolved(folder, "model.dtype=float16").deployment.model.dtype == "float16"
    gpu = ("hardware.device=cuda", "hardware.memory=8GiB")
    assert resolved(folder, *gpu).deployment.model.dtype == stored


def test_keys_of_the_deployment_lie_over_config_json(folder):
    assert resolved(folder, "model.config.max_position_embeddings=128").plan.max_len == 128


@pytest.mark.parametrize("weights", ["checkpoint", "dummy"])
@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.config.rope_thetta=5", "model.config.rope_thetta=5: nothing reads it"),
        ("model.config.rope_thetta=5", "did you mean model.config.rope_theta?"),
        ("model.config.zzzz=1", "llama reads architectures, attention_bias"),
        ("model.config.text_config={rope_thetta: 5}", "did you mean model.config.rope_theta?"),
        ("model.config.use_cache=true", "model.config.use_cache"),
    ],
)
def test_a_key_over_config_json_that_nobody_reads_is_refused(folder, weights, override, part):
    assert part in refused(folder, f"model.weights={weights}", override)


def test_a_key_that_config_json_has_or_the_family_reads_is_taken(tmp_path):
    folder = write_model(tmp_path / "m", torch_dtype="bfloat16", transformers_version="5")
    for over in ("transformers_version=4", "attention_bias=false", "dtype=float32", "rope_scaling=null"):
        resolved(folder, f"model.config.{over}")
    message = refused(folder, "model.config.rms_norm_epsilon=1")
    assert "did you mean model.config.rms_norm_eps?" in message


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-0.6b", "gemma3-270m", "qwen3-30b-a3b"])
def test_every_key_of_a_shipped_shape_is_read(model):
    resolve(compose([f"model={model}", "hardware.memory=128GiB"]))
    with pytest.raises(ConfigError, match=r"model\.config\.rope_thetta=5: nothing reads it: family"):
        resolve(compose([f"model={model}", "model.config.rope_thetta=5", "hardware.memory=128GiB"]))


def test_keys_inside_the_text_part_count(tmp_path):
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {**config, "own": 1}}))
    assert resolved(folder, "model.config.own=2", "model.config.rope_theta=5").spec.config["own"] == 2
    assert "nothing reads it" in refused(folder, "model.config.owm=2")


def test_random_weights_need_config_json_only(folder, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
    found = resolved(tmp_path / "bare", "model.weights=dummy")
    assert found.source.kind == "dummy"
    assert found.source.path == tmp_path / "bare"
    assert set(found.plan.rows) == set(resolved(folder).plan.rows)


def test_the_user_may_bring_a_family(folder, tmp_path):
    (tmp_path / "model" / "family").mkdir(parents=True)
    (tmp_path / "model" / "family" / "mine.yaml").write_text("extends: llama\nmodel_types: [mine]\n")
    mine = write_model(tmp_path / "m", model_type="mine")
    found = resolve(compose(["model=hf", f"model.path='{mine}'"], tmp_path))
    assert found.deployment.model.family == "mine"
    assert "mine" in refused(mine)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.family=lama"], "did you mean model.family=llama?"),
        (["hardware.device=cuda"], "hardware=h200"),
        (["model.max_len=1024"], "model.max_len=256"),
        (["hardware.memory=16MiB"], "hardware.memory"),
        (["model.config.num_hidden_layers=3"], "layers.2"),
        (["model.config.hidden_size=64"], "embed.weight"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(folder, overrides, part):
    assert part in refused(folder, *overrides)


def test_a_directory_that_is_no_model_is_refused(folder, tmp_path):
    assert "config.json" in refused(tmp_path)
    assert str(folder) in refused(folder.with_name("tiny-lama"))
    assert ".gguf" in refused(folder / "config.json")


def test_an_unknown_family_names_the_nearest_or_else_all(folder):
    assert refused(folder, "model.family=lama").endswith("did you mean model.family=llama?")
    assert "families: afmoe, " in refused(folder, "model.family=0000")


def test_an_unknown_model_type_names_the_nearest_family(tmp_path):
    assert "qwen3" in refused(write_model(tmp_path / "m", model_type="qwen33"))


@pytest.mark.parametrize("setting", ["kv.memory=1MiB", "hardware.memory=470MiB"])
def test_a_length_ten_times_too_large_names_one_that_works(tmp_path, setting):
    """The verdict comes within 3 seconds, before weights, and its number then starts."""
    folder = write_model(tmp_path / "m", max_position_embeddings=1 << 20)
    fits = resolved(folder, setting).plan.max_len
    begin = time.monotonic()
    message = refused(folder, setting, f"model.max_len={10 * fits}")
    assert time.monotonic() - begin < 3
    suggested = re.search(r"did you mean model\.max_len=(\d+) or ", message)
    assert suggested is not None
    assert resolved(folder, setting, f"model.max_len={suggested[1]}").plan.max_len == int(suggested[1]) >= fits


def test_an_arena_larger_than_what_is_left_names_what_is(folder):
    message = refused(folder, "kv.memory=1TiB")
    suggested = re.search(r"kv\.memory=([\d.]+GiB)\?", message)
    assert suggested is not None
    arena = resolved(folder, f"kv.memory={suggested[1]}").plan.arena_bytes
    assert 0 <= parse_bytes(suggested[1]) - arena < resolved(folder).plan.kv.page_bytes


def test_memory_may_be_a_share_of_the_devices(folder, request):
    assert resolved(folder, "hardware.memory=50%").deployment.hardware.memory == str(4 << 30)
    assert "hardware=h200" in refused(folder, "hardware.device=cuda", "hardware.memory=50%")
    request.getfixturevalue("gpu")
    assert resolved(folder, "hardware.memory=50%").deployment.hardware.memory == str(40 << 30)


def test_more_sequences_than_pages_names_a_number_that_works(folder):
    message = refused(folder, "kv.memory=64KiB", "model.max_len=16", "scheduler.max_num_seqs=500")
    suggested = re.search(r"did you mean scheduler\.max_num_seqs=(\d+) or ", message)
    assert suggested is not None
    resolved(folder, "kv.memory=64KiB", "model.max_len=16", f"scheduler.max_num_seqs={suggested[1]}")


def test_a_plan_for_other_hardware_is_not_run_here(folder):
    refuse_elsewhere(resolved(folder))
    with pytest.raises(ConfigError, match="hardware=cpu"):
        refuse_elsewhere(resolved(folder, "hardware=h200"))
    with pytest.raises(ConfigError, match=r"this machine has 7\.25 GiB beside what the system needs"):
        refuse_elsewhere(resolved(folder, "hardware.memory=1TiB", "kv.memory=20GiB"))


def test_a_gpu_is_taken_where_one_answers(folder, gpu):
    found = resolved(folder)
    hardware, scheduler = found.deployment.hardware, found.deployment.scheduler
    assert (hardware.device, hardware.name, hardware.features) == ("cuda", "NVIDIA X", ("sm_90",))
    assert int(hardware.memory) == int(0.95 * gpu.memory_bytes) >= found.plan.total_bytes
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) == (256, 8192)
    refuse_elsewhere(found)
    with pytest.raises(ConfigError, match=r"NVIDIA X has 80\.00 GiB"):
        refuse_elsewhere(resolved(folder, "hardware=h200"))
    on_cpu = resolved(folder, "hardware=cpu").deployment
    assert (on_cpu.hardware.device, on_cpu.scheduler.max_num_seqs, on_cpu.scheduler.max_step_tokens) == ("cpu", 32, 512)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (["scheduler.max_num_seqs=600"], (600, 600)),
        (["scheduler.max_step_tokens=20"], (20, 20)),
        (["scheduler.max_num_seqs=4", "scheduler.max_step_tokens=20"], (4, 20)),
    ],
)
def test_sizes_of_steps_left_open_fit_those_given(folder, given, chosen):
    scheduler = resolved(folder, *given).deployment.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_step_tokens) == chosen


def test_the_arena_is_what_was_asked_for(folder):
    assert resolved(folder, "kv.memory=3MiB").plan.arena_bytes <= parse_bytes("3MiB")


def test_a_verdict_is_quick_and_needs_no_torch(folder):
    code = (
        "import sys; from treadle.conf.load import compose; from treadle.graph.resolve import resolve;"
        f"resolve(compose(['model=hf', {json.dumps(f'model.path={folder}')}])); assert 'torch' not in sys.modules"
    )
    before = os.times()
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_deployment_measures_nothing(folder, deterministic):
    once = resolved(folder, f"passes.deterministic={deterministic}")
    passes = once.deployment.passes
    assert {passes.measure, passes.fuse_linear_add, passes.fuse_norm_gated} == {not deterministic}
    assert resolve(once.deployment).deployment == once.deployment
