"""Attention of which a query's result has the same bits in every step, against the reference: C++ and Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton_mode  # noqa: F401  (sets the interpreter up)
from pages import Pages, starts
from torch import Tensor
from triton_compile import compile_for_sm90

from treadle.kernels import native, paged_attention_invariant, registry
from treadle.kernels.paged_attention import paged_attention_cpp

REFERENCE = registry.reference("paged_attention").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
OPTIONS = [{}, {"window": 40, "softcap": 3.0, "sinks": True}]

Attend = Callable[..., Tensor]


def one_way(*args: object) -> Tensor:
    assert native.usable("paged_attention")
    return paged_attention_cpp(*args, one_way=True)  # type: ignore[arg-type]


def on(device: str, **options: object) -> Attend:
    def run(*args: object) -> Tensor:
        moved = [value.to(device) if isinstance(value, Tensor) else value for value in args]
        return paged_attention_invariant.paged_attention(*moved, **options).cpu()  # type: ignore[arg-type]

    return run


ATTEND = {"cpp": one_way}
for name in ("cpu", "cuda"):
    ATTEND |= {f"triton {name}": on(name, split=False), f"triton {name}, split": on(name, split=True)}
WAYS = [
    *(name for name in ATTEND if "cuda" not in name),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ATTEND if "cuda" in name),
]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention_invariant, "SPAN", 64)
    monkeypatch.setattr(paged_attention_invariant, "JOINED", 2)


def args_of(
    pages: Pages, q: Tensor, lengths: list[int], counts: list[int], window: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None, order: list[int] | None = None,
) -> tuple[object, ...]:  # fmt: skip
    table = pages.table if order is None else pages.table[order]
    return (
        q, pages.arena, table, starts(counts), torch.tensor(lengths, dtype=torch.int32), pages.layer_offset, sinks,
        pages.page_tokens, pages.kv_heads, pages.v_dim, pages.k_dim**-0.5, window, softcap,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_step_equals_the_reference(way: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    lengths, counts, padding = [70, 0, 21, 33, 0, 2], [1, 1, 21, 1, 0, 2], 3
    pages = Pages(lengths, 1, 24, 8, 8, dtype)
    q = pages.randn(sum(counts) + padding, 2, 24)
    options = {**options, "sinks": pages.randn(2)} if "sinks" in options else options
    args = args_of(pages, q, lengths, counts, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(ATTEND[way](*args), REFERENCE(*args), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("way", [way for way in WAYS if "split" not in str(way)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_query_has_the_same_bits_however_it_is_computed(
    way: str, dtype: torch.dtype, options: dict[str, object]
) -> None:
    """Sequence 0 as one prompt, in chunks, token by token, and among others: written ahead or not."""
    lengths = [75, 70, 5]
    pages = Pages(lengths, 1, 24, 40, 8, dtype)
    q = pages.randn(75, 2, 24)
    other = pages.randn(6, 2, 24)
    options = {**options, "sinks": pages.randn(2)} if "sinks" in options else options
    attend = ATTEND[way]
    whole = attend(*args_of(pages, q, lengths[:1], [75], **options))  # type: ignore[arg-type]
    for first, end, company in ((0, 30, True), (30, 37, False), (60, 75, True), (74, 75, False)):
        rows, sizes, ends, order = q[first:end], [end - first], [end], [0]
        if company:
            rows, sizes, ends, order = (
                torch.cat([other[:1], rows, other[1:]]),
                [1, end - first, 5],
                [70, end, 5],
                [1, 0, 2],
            )
        args = args_of(pages, rows, ends, sizes, order=order, **options)  # type: ignore[arg-type]
        at = order.index(0)
        mine = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
        for each in (f"{way}, split", way) if "triton" in way else (way,):
            assert torch.equal(ATTEND[each](*args)[mine], whole[first:end]), (each, first, end)


def test_the_usual_kernels_would_fail_that() -> None:
    pages = Pages([300], 2, 64, 64, 8, torch.float32)
    q = pages.randn(300, 6, 64)
    whole = paged_attention_cpp(*args_of(pages, q, [300], [300]))  # type: ignore[arg-type]
    last = paged_attention_cpp(*args_of(pages, q[-1:], [300], [1]))  # type: ignore[arg-type]
    assert not torch.equal(whole[-1:], last)


@pytest.mark.parametrize("way", WAYS)
def test_pages_before_the_window_are_not_read(way: str) -> None:
    pages = Pages([90], 1, 16, 16, 4, torch.float32)
    for count in (1, 30):
        args = args_of(pages, pages.randn(count, 3, 16), [90], [count], window=20)
        expected = ATTEND[way](*args)
        table = pages.table.clone()
        table[:, : (90 - count - 19) // 4] = 0  # the scratch page, full of NaN here
        assert torch.equal(ATTEND[way](args[0], args[1], table, *args[3:]), expected)


def test_every_step_compiles_for_sm_90() -> None:
    launches = """
from treadle.kernels.paged_attention_invariant import paged_attention
for dtype, dim, window, sinks in ((torch.bfloat16, 128, 0, False), (torch.bfloat16, 256, 512, True),
                                  (torch.float32, 64, 0, False)):
    for tokens, sequences in ((1, 1), (300, 7), (16, 16)):
        q = torch.empty(tokens, 8, dim, dtype=dtype)
        ints = [torch.empty(n, dtype=torch.int32) for n in (sequences + 1, sequences)]
        table = torch.empty(sequences, 64, dtype=torch.int32)
        for split in (False, True):
            metadata = (table, *ints, torch.zeros((), dtype=torch.int64), q.new_empty(8) if sinks else None)
            paged_attention(q, torch.empty(1 << 20, dtype=torch.uint8), *metadata, 16, 2, dim, 0.1, window, 0.0,
                            pdl=True, split=split)
"""
    compiled = compile_for_sm90(launches)
    assert {each["name"] for each in compiled} == {"attend", "join"}
    assert all(each["wgmma"] for each in compiled[:9] if each["name"] == "attend")
