"""The Triton kernels of the recurrences of single families against what these mean, a token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import scan_cases
import torch
from block_cases import SCRIPTS, SHORT, Case, Step, check_captured, play, same_in_any_company
from block_steps import ROW, Steps
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.decay_scan_triton import decay_scan
from treadle.kernels.rglru_triton import rglru
from treadle.kernels.token_shift_triton import token_shift
from treadle.kernels.wkv_triton import wkv

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OPS = {"decay_scan": decay_scan, "rglru": rglru, "token_shift": token_shift, "wkv": wkv}
SMALL: dict[str, dict[str, Any]] = {
    "decay_scan": {"heads": 1, "dim": 8},
    "rglru": {"channels": 8},
    "token_shift": {"channels": 8},
    "wkv": {"channels": 8},
}
SIZES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("decay_scan", BF16, {"dim": 20, "heads": 3}),
    ("decay_scan", FP16, {"rate": 1e-4}),
    ("decay_scan", FP32, {"dim": 33, "rate": 20.0}),
    ("rglru", BF16, {"channels": 37}),
    ("rglru", FP16, {"channels": 130}),
    ("rglru", FP32, {"channels": 7, "param": -9.0}),
    ("rglru", FP32, {"channels": 16, "param": 30.0}),
    ("token_shift", BF16, {"channels": 131}),
    ("token_shift", FP16, {"channels": 7}),
    ("wkv", BF16, {"channels": 37}),
    ("wkv", FP16, {"channels": 130, "decay": -6.0}),
    ("wkv", FP32, {"channels": 7, "scale": 60.0}),
    ("wkv", FP32, {"channels": 16, "decay": 4.0}),
]
REAL = {
    "minimax": ("decay_scan", {"heads": 64, "dim": 128}),
    "recurrentgemma": ("rglru", {"channels": 4096, "param": -6.0}),
    "rwkv-4's shift": ("token_shift", {"channels": 5120}),
    "rwkv-4": ("wkv", {"channels": 5120, "decay": -3.0}),
}
"""Sizes of models: of one layer, bfloat16."""


def case(op: str, dtype: torch.dtype, sizes: dict[str, Any]) -> Case:
    made: Case = getattr(scan_cases, op)(dtype, **sizes)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("op", OPS)
def test_every_kind_of_step(device: str, op: str, script: str):
    play(OPS[op], case(op, FP32, SMALL[op]), SCRIPTS[script], FP32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "dtype", "sizes"), SIZES)
def test_every_size(device: str, op: str, dtype: torch.dtype, sizes: dict[str, Any]):
    play(OPS[op], case(op, dtype, {"sequences": 2, **sizes}), SHORT, dtype, device, exact=op != "decay_scan")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_in_any_company(device: str, op: str):
    same_in_any_company(OPS[op], case(op, BF16, {"tokens": 40}), 20, device, invariant=True)


@pytest.mark.parametrize("device", DEVICES)
def test_more_sequences_than_a_program_sees_together(device: str):
    one = case("token_shift", FP32, {"channels": 4, "sequences": 130, "tokens": 70})
    step = Step([(128, 70), *((sequence, 1) for sequence in range(128)), (129, 66)], 2)
    play(token_shift, one, [step], FP32, device)


@pytest.mark.parametrize("device", DEVICES)
def test_states_beyond_float16_stay_finite(device: str):
    """Sums over tokens that hardly fade do not pass through the model's dtype."""
    q, k, v = torch.full((40, 1, 16), 0.01), torch.full((40, 1, 16), 60.0), torch.full((40, 1, 16), 60.0)
    rows = [[q.half(), k.half(), v.half()]]
    one = Case(scan_cases.decay_oracle, rows, [ROW, ROW, ROW, torch.tensor([-1e-6])], [], 4 * 16 * 16)
    play(decay_scan, one, [Step([(0, 20)]), Step([(0, 20)])], FP16, device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_slowest_decays_keep_their_digits(device: str):
    """They are 1 less something so small that the sum of both has lost it."""
    one = case("rglru", FP32, {"channels": 8, "param": -12.0, "sequences": 1, "tokens": 150})
    steps = Steps(1, one.part_bytes, device)
    (made,) = steps.run(rglru, one.rows, one.constants, one.after, [(0, 150)])
    torch.testing.assert_close(made.double(), one.expected(0, 150)[0], atol=0, rtol=2e-5)


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
import scan_cases as cases
from block_steps import Steps
from treadle.kernels import decay_scan_triton, rglru_triton, token_shift_triton, wkv_triton
for dtype in (torch.bfloat16, torch.float32):
    for op, case in (
        (decay_scan_triton.decay_scan, cases.decay_scan(dtype, dim=32, sequences=2)),
        (rglru_triton.rglru, cases.rglru(dtype, sequences=2)),
        (token_shift_triton.token_shift, cases.token_shift(dtype, sequences=2)),
        (wkv_triton.wkv, cases.wkv(dtype, sequences=2)),
    ):
        steps = Steps(2, case.part_bytes)
        for pairs in ([(0, 1), (1, 1)], [(0, 140), (1, 1)]):
            op(*steps.inputs(case.rows, case.constants, pairs), *case.after, pdl=dtype is torch.bfloat16)
"""
    )
    names = [each["name"] for each in compiled]
    assert {"rglru_steps", "shift_rows", "wkv_steps"} < set(names)
    assert all(names.count(name) == 4 for name in ("rglru_steps", "shift_rows", "wkv_steps"))


@pytest.mark.parametrize("op", OPS)
def test_they_are_chosen_for_what_they_know(op: str):
    dtypes = dict.fromkeys(("x", "q", "k", "v", "in_gate", "a_gate", "in_bias", "a_bias", "param"), BF16)
    dtypes |= dict.fromkeys(("rates", "decay", "first"), FP32)
    known: dict[str, Any] = {"dtypes": dtypes}
    for deterministic, variant in ((False, "triton"), (True, "triton_invariant")):
        target = Target(
            device="cuda", features=frozenset({"sm_90"}), dtype="bfloat16", deterministic=deterministic
        )  # fmt: skip
        names = [one.name for one in registry.candidates(op, target, known)]
        assert names[:2] == [f"{op}.{variant}_pdl", f"{op}.{variant}"]
    cpu = Target(device="cpu", features=frozenset(), dtype="bfloat16")
    assert registry.candidates(op, cpu, known)[0].is_reference
    unknown = {"dtypes": dtypes | dict.fromkeys(("v", "x"), torch.float64)}
    plain = Target(device="cuda", features=frozenset(), dtype="bfloat16")
    assert registry.candidates(op, plain, unknown)[0].is_reference
