"""The C++ kernels of the ops with a block state against what the ops mean, a token at a time."""

from __future__ import annotations

from typing import Any

import block_cases
import pytest
import torch
from block_cases import SCRIPTS, play, same_in_any_company

from treadle.kernels import registry

OPS = {
    op: registry.named(f"{op}.cpp").function for op in ("delta_rule", "ssm_scan", "selective_scan", "conv1d")
}  # fmt: skip
SIZES: list[tuple[str, dict[str, Any]]] = [
    ("delta_rule", {"k_dim": 32, "v_dim": 64}),
    ("delta_rule", {"k_dim": 19, "v_dim": 37, "k_heads": 2, "heads": 6, "by_channel": True}),
    ("delta_rule", {"k_dim": 5, "v_dim": 3, "heads": 3, "l2norm": False}),
    ("delta_rule", {"decay": 30.0}),
    ("delta_rule", {"decay": 30.0, "by_channel": True}),
    ("ssm_scan", {"dim": 20, "size": 33, "skip": False}),
    ("ssm_scan", {"dim": 9, "size": 130, "heads": 2, "groups": 1}),
    ("ssm_scan", {"decay": 50.0, "size": 80}),
    ("selective_scan", {}),
    ("selective_scan", {"channels": 133, "size": 19, "skip": False}),
    ("selective_scan", {"decay": 50.0, "size": 7}),
    ("conv1d", {}),
    ("conv1d", {"channels": 263, "taps": 2, "bias": False, "act": "none"}),
    ("conv1d", {"channels": 7, "taps": 9}),
    ("conv1d", {"channels": 7, "taps": 1}),
]
NAMES = [f"{op} {sizes}" for op, sizes in SIZES]


def case(op: str, dtype: torch.dtype, sizes: dict[str, Any]) -> block_cases.Case:
    made: block_cases.Case = getattr(block_cases, op)(dtype, **sizes)
    return made


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("op", OPS)
def test_every_kind_of_step(op: str, script: str):
    play(OPS[op], case(op, torch.float32, {}), SCRIPTS[script], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "sizes"), SIZES, ids=NAMES)
def test_every_size(op: str, sizes: dict[str, Any], dtype: torch.dtype):
    play(OPS[op], case(op, dtype, sizes), SCRIPTS["prompts cut in two"], dtype)


@pytest.mark.parametrize(("op", "sizes"), SIZES, ids=NAMES)
def test_a_row_has_the_same_bits_in_any_company(op: str, sizes: dict[str, Any]):
    same_in_any_company(OPS[op], case(op, torch.bfloat16, sizes), 90)


def test_many_threads_do_what_one_does():
    one = case("delta_rule", torch.float32, {"heads": 8, "k_dim": 64, "v_dim": 64})
    alone = block_cases.bits(OPS["delta_rule"], one, SCRIPTS["prompts cut in two"])
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        together = block_cases.bits(OPS["delta_rule"], one, SCRIPTS["prompts cut in two"])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_more_taps_than_the_kernel_has_are_refused():
    with pytest.raises(ValueError, match="129 taps"):
        play(OPS["conv1d"], block_cases.conv1d(torch.float32, taps=129), SCRIPTS["one token at a time"], torch.float32)
