"""The CPU's experts, plain and int8, against their references: few rows in C++, many by products expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.graph.target import Target
from treadle.kernels import experts_native, registry
from treadle.kernels.experts import experts, experts_cpp
from treadle.kernels.experts_int8 import experts_int8, experts_int8_cpp
from treadle.kernels.linear_int8 import quantize_int8

E, GROUP = 5, 8
CPU = Target(device="cpu")


def inputs(
    tokens: int, channels: int, inner: int, *, gated: bool = True, bias: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens * 1000 + channels)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    width = 2 * inner if gated else inner
    return {
        "x": randn(tokens, channels),
        "weights": torch.rand(tokens, 2, generator=generator),
        "ids": torch.randint(-1, E + 1, (tokens, 2), generator=generator).int(),
        "up": randn(E, width, channels) / channels**0.5,
        "up_bias": randn(E, width) if bias else None,
        "down": randn(E, channels, inner) / inner**0.5,
        "down_bias": randn(E, channels) if bias else None,
    }


def quantised(a: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for name, value in a.items():
        made[name] = value
        if name in ("up", "down"):
            codes, scales = quantize_int8(value.flatten(0, 1), GROUP)
            made[name] = codes.view(value.shape)
            made[f"{name}_scale"] = scales.view(*value.shape[:-1], -1)
    return {**made, "group": GROUP}


ACTS: list[dict[str, Any]] = [{"act": act} for act in experts_native.ACTS if act not in ("swiglu_oai", "situ")]
ACTS += [{"act": act, "gated": False} for act in ("relu2", "gelu")]
ACTS += [
    {"act": "swiglu_oai", "limit": 0.7, "alpha": 1.5},
    {"act": "situ", "beta": 4.0, "linear_beta": 25.0},
    {"act": "silu", "limit": 0.3},
    {"act": "silu", "weigh_input": True},
]


@pytest.mark.parametrize("options", ACTS, ids=str)
def test_every_activation(options: dict[str, Any]) -> None:
    a = inputs(3, 40, 24, gated=options.get("gated", True))
    torch.testing.assert_close(experts_cpp(**a, **options), experts(**a, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 19, 90])
@pytest.mark.parametrize(("channels", "inner"), [(24, 8), (72, 40), (136, 104)])
def test_sizes_and_dtypes(dtype: torch.dtype, tokens: int, channels: int, inner: int) -> None:
    a = inputs(tokens, channels, inner, bias=tokens % 2 == 0, dtype=dtype)
    exact = experts(**{n: v.float() if n not in ("weights", "ids") and v is not None else v for n, v in a.items()})
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    found = experts_cpp(**a)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, atol=tolerance, rtol=tolerance)
    q = quantised(a)
    exact = experts_int8(
        **{n: v.float() if n in ("x", "up_bias", "down_bias") and v is not None else v for n, v in q.items()}
    )
    torch.testing.assert_close(experts_int8_cpp(**q).float(), exact, atol=tolerance, rtol=tolerance)


def test_a_token_alone_gives_the_bits_it_gives_among_others() -> None:
    a = inputs(30, 72, 40)
    together = experts_cpp(**a)
    for t in (0, 7, 29):
        alone = experts_cpp(**{n: v[t : t + 1] if n in ("x", "weights", "ids") else v for n, v in a.items()})
        assert torch.equal(alone[0], together[t])


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
def test_threads_change_nothing() -> None:
    a = inputs(30, 72, 40)
    torch.testing.assert_close(experts_cpp(**a), experts(**a), atol=1e-5, rtol=1e-5)


def test_only_visited_experts_are_read() -> None:
    """The weights of the others could lie on pages that were never touched: here they are NaN."""
    a = inputs(4, 24, 8, bias=False)
    a["ids"] = torch.tensor([[0, 3], [3, 0], [0, -1], [E, 3]]).int()
    for name in ("up", "down"):
        a[name][[1, 2, 4]] = torch.nan
    assert experts_cpp(**a).isfinite().all()


def test_dead_rows_give_zeros() -> None:
    a = inputs(4, 24, 8)
    a["ids"][1], a["weights"][1], a["x"][1] = -1, torch.nan, torch.nan
    found = experts_cpp(**a)
    assert not found[1].any()
    assert found.isfinite().all()


def test_the_kernels_are_chosen_where_they_work() -> None:
    for op in ("experts", "experts_int8"):
        assert registry.candidates(op, CPU, {})[0].name == f"{op}.cpp"
        assert registry.candidates(op, CPU, {"act": "softplus"})[0].is_reference
        assert registry.candidates(op, Target(device="cuda"), {})[0].is_reference or op == "experts"
        doubles = {"dtypes": dict.fromkeys(("x", "up", "down"), torch.float64)}
        assert registry.candidates(op, CPU, doubles)[0].is_reference
    low = {"dtypes": {"x": torch.bfloat16, "up": torch.int8, "down": torch.int8, "up_scale": torch.float32}}
    assert registry.candidates("experts_int8", CPU, low)[0].name == "experts_int8.cpp"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, int8: bool) -> None:
    tokens = 60  # more than are usually left to the C++ kernel
    given = inputs(tokens, 24, 40, dtype=dtype)
    if int8:
        (up, up_scale), (down, down_scale) = (
            (codes.view(stack.shape), scale.view(*stack.shape[:2], -1))
            for stack in (given["up"], given["down"])
            for codes, scale in [quantize_int8(stack.flatten(0, 1), GROUP)]
        )
        stacks = (up, up_scale, given["up_bias"], down, down_scale, given["down_bias"], GROUP)
    else:
        stacks = (given["up"], given["up_bias"], given["down"], given["down_bias"])

    def run(rows: slice, invariant: bool = True) -> Tensor:
        function: Any = experts_int8_cpp if int8 else experts_cpp
        tokens_of = (given[name][rows] for name in ("x", "weights", "ids"))
        return function(*tokens_of, *stacks, invariant=invariant)

    whole = run(slice(tokens))
    for count in range(1, tokens + 1):
        for first in {0, tokens - count}:
            rows = slice(first, first + count)
            assert torch.equal(run(rows), whole[rows])
    assert not torch.equal(run(slice(tokens), invariant=False), whole)
