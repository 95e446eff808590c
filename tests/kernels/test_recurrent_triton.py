"""The Triton kernels of the ops with a block state against what the ops mean, a token at a time."""

from __future__ import annotations

from typing import Any

import block_cases
import pytest
import torch
from block_cases import SCRIPTS, SHORT, Case, Step, check_captured, play, same_in_any_company
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.graph import recurrent_rows
from treadle.graph.target import Target
from treadle.kernels import registry, selective_scan_triton, ssm_scan_triton
from treadle.kernels.conv1d_triton import conv1d
from treadle.kernels.delta_rule_triton import delta_rule
from treadle.kernels.selective_scan_triton import selective_scan
from treadle.kernels.ssm_scan_triton import ssm_scan

FP32, BF16 = torch.float32, torch.bfloat16
OPS = {"delta_rule": delta_rule, "ssm_scan": ssm_scan, "selective_scan": selective_scan, "conv1d": conv1d}
SMALL: dict[str, dict[str, Any]] = {
    "delta_rule": {"heads": 1},
    "ssm_scan": {"heads": 1, "groups": 1},
    "selective_scan": {"channels": 8},
    "conv1d": {"channels": 8},
}
SIZES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("delta_rule", BF16, {"k_dim": 32, "v_dim": 48}),
    ("delta_rule", FP32, {"k_dim": 19, "v_dim": 7, "k_heads": 2, "heads": 6, "l2norm": False}),
    ("delta_rule", FP32, {"decay": 30.0, "alike": True}),
    ("delta_rule", BF16, {"decay": 0.01, "alike": True}),
    ("delta_rule", BF16, {"k_dim": 19, "v_dim": 37, "by_channel": True}),
    ("delta_rule", BF16, {"k_dim": 32, "v_dim": 48, "by_channel": True}),
    ("delta_rule", BF16, {"k_dim": 16, "v_dim": 16, "by_channel": True}),
    ("delta_rule", FP32, {"decay": 30.0, "by_channel": True}),
    ("delta_rule", BF16, {"decay": 0.01, "alike": True, "by_channel": True}),
    ("ssm_scan", BF16, {"dim": 20, "size": 33, "skip": False}),
    ("ssm_scan", BF16, {"dim": 32, "size": 64, "skip": False}),
    ("ssm_scan", FP32, {"dim": 9, "size": 130, "heads": 2, "groups": 1}),
    ("ssm_scan", BF16, {"decay": 50.0, "size": 80}),
    ("selective_scan", FP32, {"channels": 37, "size": 19, "skip": False}),
    ("selective_scan", BF16, {"decay": 50.0, "size": 7}),
    ("conv1d", BF16, {}),
    ("conv1d", FP32, {"channels": 133, "taps": 2, "bias": False, "act": "none"}),
    ("conv1d", BF16, {"channels": 7, "taps": 9}),
    ("conv1d", BF16, {"channels": 7, "taps": 1}),
]
REAL = {
    "qwen3-next": ("delta_rule", {"k_heads": 16, "heads": 32, "k_dim": 128, "v_dim": 128}),
    "kimi-linear": ("delta_rule", {"k_heads": 32, "heads": 32, "k_dim": 128, "v_dim": 128, "by_channel": True}),
    "nemotron-h": ("ssm_scan", {"heads": 128, "dim": 64, "groups": 8, "size": 128}),
    "falcon-mamba": ("selective_scan", {"channels": 8192}),
    "qwen3-next's convolution": ("conv1d", {"channels": 8192, "bias": False}),
}
"""Sizes of models: of one layer, bfloat16."""


def case(op: str, dtype: torch.dtype, sizes: dict[str, Any]) -> Case:
    made: Case = getattr(block_cases, op)(dtype, **sizes)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("op", OPS)
def test_every_kind_of_step(device: str, op: str, script: str):
    play(OPS[op], case(op, FP32, SMALL[op]), SCRIPTS[script], FP32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "dtype", "sizes"), SIZES)
def test_every_size(device: str, op: str, dtype: torch.dtype, sizes: dict[str, Any]):
    play(OPS[op], case(op, dtype, {"sequences": 2, **sizes}), SHORT, dtype, device, exact=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_in_any_company(device: str, op: str):
    same_in_any_company(OPS[op], case(op, BF16, {"tokens": 40}), 20, device, invariant=True)


@pytest.mark.parametrize("device", DEVICES)
def test_more_sequences_than_a_program_sees_together(device: str):
    one = case("delta_rule", FP32, {"k_dim": 4, "v_dim": 4, "heads": 1, "sequences": 130, "tokens": 70})
    step = Step([(128, 70), *((sequence, 1) for sequence in range(128)), (129, 66)], 2)
    play(delta_rule, one, [step], FP32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("op", ["ssm_scan", "selective_scan"])
def test_prompts_of_several_segments(device: str, op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    for module in (recurrent_rows, ssm_scan_triton, selective_scan_triton):
        monkeypatch.setattr(module, "SEGMENT", 32)
    for module in (ssm_scan_triton, selective_scan_triton):
        monkeypatch.setattr(module, "LEAST", 16)
    script = [Step([(0, 97), (1, 1), (2, 33)]), Step([(1, 70), (0, 1), (2, 32)], 3), Step([(2, 0), (1, 65)], 0, (0,))]
    play(OPS[op], case(op, dtype, {**SMALL[op], "size": 9}), script, dtype, device, exact=dtype is FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("model", REAL)
def test_real_sizes(model: str, pdl: bool):
    op, sizes = REAL[model]
    play(OPS[op], case(op, BF16, sizes), SCRIPTS["prompts cut in two"], BF16, "cuda", exact=False, pdl=pdl)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [[(0, 1), (1, 1), (2, 1)], [(2, 1), (0, 90), (1, 20)]])
@pytest.mark.parametrize("model", REAL)
def test_a_captured_step_serves_any_lengths(model: str, pairs: list[tuple[int, int]]):
    op, sizes = REAL[model]
    check_captured(OPS[op], case(op, BF16, sizes), pairs)


def test_every_kernel_compiles_for_sm_90():
    compiled = compile_for_sm90(
        """
from block_cases import conv1d as c, delta_rule as d, selective_scan as s, ssm_scan as m
from block_steps import Steps
from treadle.graph import recurrent_rows
from treadle.kernels import conv1d_triton, delta_rule_triton, selective_scan_triton, ssm_scan_triton
recurrent_rows.SEGMENT = ssm_scan_triton.SEGMENT = selective_scan_triton.SEGMENT = 128
for dtype, large in ((torch.bfloat16, 128), (torch.float32, 32)):
    cases = [
        (delta_rule_triton.delta_rule, d(dtype, k_dim=large, v_dim=large, sequences=2)),
        (delta_rule_triton.delta_rule, d(dtype, k_dim=large, v_dim=large, sequences=2, by_channel=True)),
        (ssm_scan_triton.ssm_scan, m(dtype, size=large, sequences=2)),
        (selective_scan_triton.selective_scan, s(dtype, sequences=2)),
        (conv1d_triton.conv1d, c(dtype, sequences=2)),
    ]
    for op, case in cases:
        steps = Steps(2, case.part_bytes)
        for pairs in ([(0, 1), (1, 1)], [(0, 140), (1, 1)]):
            op(*steps.inputs(case.rows, case.constants, pairs), *case.after, pdl=dtype is torch.bfloat16)
"""
    )
    steps = ["prepare", "advance", "delta_steps"]
    scans = ["ssm_steps", "ssm_segments", "ssm_join", "ssm_segments", "ssm_steps"]
    segments = ["selective_segments", "join_segments", "selective_segments", "selective_steps"]
    once = ["delta_steps", *steps, "delta_steps", *steps, *scans, "selective_steps", *segments, *["convolve"] * 2]
    assert [each["name"] for each in compiled] == once * 2
    for each in compiled[: len(once)]:
        assert each["wgmma"] == (each["name"] in ("prepare", "advance", "ssm_segments")), each


@pytest.mark.parametrize("op", OPS)
def test_they_are_chosen_for_what_they_know(op: str):
    parameters = {"x": BF16, "weight": BF16, "B": BF16, "C": BF16, "q": BF16, "k": BF16, "v": BF16}
    fp32 = dict.fromkeys(("g", "beta", "dt", "A"), FP32)
    known: dict[str, Any] = {"dtypes": parameters | fp32}
    for deterministic, variant in ((False, "triton"), (True, "triton_invariant")):
        target = Target(
            device="cuda", features=frozenset({"sm_90"}), dtype="bfloat16", deterministic=deterministic
        )  # fmt: skip
        names = [one.name for one in registry.candidates(op, target, known)]
        assert names[:2] == [f"{op}.{variant}_pdl", f"{op}.{variant}"]
    cpu = Target(device="cpu", features=frozenset(), dtype="bfloat16", deterministic=True)
    assert registry.candidates(op, cpu, known)[0].name == f"{op}.cpp"
    mixed = {"dtypes": parameters | fp32 | {"weight": FP32, "v": FP32, "B": FP32}}
    assert registry.candidates(op, Target(device="cuda", features=frozenset(), dtype="bfloat16"), mixed)[0].is_reference
