"""The Triton kernels of the ops with a block state against what the ops mean, a token at a time."""

from __future__ import annotations

from typing import Any

import block_cases
import pytest
import torch
from block_cases import SCRIPTS, play, same_in_any_company
from triton_mode import DEVICES

from treadle.kernels.conv1d_triton import conv1d
from treadle.kernels.delta_rule_triton import delta_rule
from treadle.kernels.selective_scan_triton import selective_scan
from treadle.kernels.ssm_scan_triton import ssm_scan

OPS = {"delta_rule": delta_rule, "ssm_scan": ssm_scan, "selective_scan": selective_scan, "conv1d": conv1d}
SIZES: list[tuple[str, dict[str, Any]]] = [
    ("delta_rule", {"k_dim": 32, "v_dim": 48}),
    ("delta_rule", {"k_dim": 19, "v_dim": 37, "k_heads": 2, "heads": 6, "by_channel": True}),
    ("delta_rule", {"k_dim": 32, "v_dim": 9, "heads": 3, "l2norm": False}),
    ("delta_rule", {"decay": 30.0, "alike": True}),
    ("delta_rule", {"decay": 30.0, "by_channel": True}),
    ("delta_rule", {"decay": 0.01, "alike": True, "by_channel": True}),
    ("ssm_scan", {"dim": 20, "size": 33, "skip": False}),
    ("ssm_scan", {"dim": 9, "size": 130, "heads": 2, "groups": 1}),
    ("ssm_scan", {"decay": 50.0, "size": 80}),
    ("selective_scan", {}),
    ("selective_scan", {"channels": 37, "size": 19, "skip": False}),
    ("selective_scan", {"decay": 50.0, "size": 7}),
    ("conv1d", {}),
    ("conv1d", {"channels": 133, "taps": 2, "bias": False, "act": "none"}),
    ("conv1d", {"channels": 7, "taps": 9}),
    ("conv1d", {"channels": 7, "taps": 1}),
]
NAMES = [f"{op} {sizes}" for op, sizes in SIZES]


def case(op: str, dtype: torch.dtype, sizes: dict[str, Any]) -> block_cases.Case:
    made: block_cases.Case = getattr(block_cases, op)(dtype, **sizes)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("op", OPS)
def test_every_kind_of_step(device: str, op: str, script: str):
    play(OPS[op], case(op, torch.float32, {}), SCRIPTS[script], torch.float32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "sizes"), SIZES, ids=NAMES)
def test_every_size(device: str, op: str, sizes: dict[str, Any], dtype: torch.dtype):
    play(OPS[op], case(op, dtype, sizes), SCRIPTS["prompts cut in two"], dtype, device, exact=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_in_any_company(device: str, op: str):
    same_in_any_company(OPS[op], case(op, torch.bfloat16, {}), device, invariant=True)
