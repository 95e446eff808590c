"""The Triton kernels against the reference: interpreted here, natively on a GPU, compiled for sm_90 anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages, starts
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import registry
from treadle.kernels.paged_attention_launch import paged_attention
from treadle.kernels.paged_attention_tiles import DecodeTiles, PrefillTiles

REFERENCE = registry.reference("paged_attention").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)

BATCHES = {
    "decode": ([9, 40, 1], [1, 1, 1], 0),
    "decode with a stopped sequence": ([9, 0, 40], [1, 1, 1], 0),
    "padded decode": ([9, 40, 0, 0], [1, 1, 0, 0], 2),
    "as many tokens as sequences, in one of them": ([30, 5, 9], [3, 0, 0], 0),
    "as many tokens as sequences, two and none": ([30, 5, 9], [1, 0, 2], 0),
    "more sequences than tokens": ([9, 12, 0], [1, 1, 0], 0),
    "one token": ([20], [1], 0),
    "few tokens": ([33], [5], 1),
    "prompt": ([70], [70], 0),
    "chunk over a prefix": ([90], [12], 3),
    "prompt of one token, padded": ([1], [1], 9),
    "mixed": ([9, 40, 27, 33], [1, 1, 9, 1], 0),
    "mixed, padded, with stopped sequences": ([9, 0, 27, 0, 33, 0], [1, 1, 9, 2, 4, 0], 5),
}


def arguments(
    pages: Pages, lengths: list[int], counts: list[int], padding: int = 0, group: int = 3, window: int = 0,
    softcap: float = 0.0, sinks: bool = False, chunk: int = 0, alibi: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    rows, heads = sum(counts) + padding, pages.kv_heads * group
    q = pages.randn(rows, heads * pages.k_dim + 8)[:, : heads * pages.k_dim].view(rows, heads, pages.k_dim)
    return (
        q, pages.arena, pages.table, starts(counts), torch.tensor(lengths, dtype=torch.int32), pages.layer_offset,
        pages.randn(heads) if sinks else None, pages.page_tokens, pages.kv_heads, pages.v_dim, pages.k_dim**-0.5,
        window, softcap, chunk, torch.rand(heads, generator=pages.random) if alibi else None,
    )  # fmt: skip


def on(device: str, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in args)


def check(device: str, args: tuple[object, ...], **tiles: object) -> None:
    expected = REFERENCE(*args)
    got = paged_attention(*on(device, args), **tiles).cpu()
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_batch(device: str, dtype: torch.dtype, batch: str):
    lengths, counts, padding = BATCHES[batch]
    check(device, arguments(Pages(lengths, 2, 16, 16, 4, dtype), lengths, counts, padding))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"window": 11}, {"softcap": 3.0}, {"sinks": True}, {"chunk": 16}, {"alibi": True}])
@pytest.mark.parametrize("batch", ["decode with a stopped sequence", "mixed, padded, with stopped sequences"])
@pytest.mark.parametrize("splits", [1, 3])
def test_every_option(device: str, options: dict[str, object], batch: str, splits: int):
    lengths, counts, padding = BATCHES[batch]
    args = arguments(Pages(lengths, 2, 24, 8, 4, torch.float32), lengths, counts, padding, **options)
    check(device, args, decode=DecodeTiles(block=16, warps=4, stages=2, splits=splits, prefetch=False))


@settings(deadline=None, max_examples=25)
@given(st.data())
def interpreted_equals_the_reference(device: str, data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 33, 65, 80]), max_size=4))
    counts = [min(draw(1, 1, 2, 5, 20), length) or draw(0, 1) for length in lengths]
    k_dim = draw(8, 16, 31, 32, 33)
    pages = Pages(
        lengths, draw(1, 2), k_dim, draw(k_dim, 20), draw(1, 3, 8, 16), draw(*DTYPES), data.draw(st.integers(0, 99))
    )
    args = arguments(
        pages, lengths, counts, draw(0, 2), draw(1, 2, 3), draw(0, 1, 17), draw(0.0, 20.0), draw(False, True),
        draw(0, 0, 1, 20), draw(False, True),
    )  # fmt: skip
    decode = DecodeTiles(block=draw(16, 32), warps=4, stages=2, splits=draw(1, 2, 3, 8), prefetch=draw(False, True))
    prefill = PrefillTiles(
        rows=draw(16, 32), block=draw(16, 32), warps=4, stages=2, occupancy=draw(1, 8), keys=draw(0, 8, 16, 30),
        waves=draw(1, 4),
    )  # fmt: skip
    check(device, args, decode=decode, prefill=prefill)


@pytest.mark.parametrize("device", DEVICES)
def test_any_batch_equals_the_reference(device: str):
    interpreted_equals_the_reference(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 16, 71])
@pytest.mark.parametrize("count", [1, 10])
def test_many_query_heads_share_one_kv_head(device: str, group: int, count: int):
    check(device, arguments(Pages([50], 1, 16, 16, 16, torch.float16), [50], [count], 0, group))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(256, 256), (192, 128), (72, 80)])
def test_wide_heads(device: str, k_dim: int, v_dim: int):
    for count in (1, 20):
        args = arguments(Pages([40], 1, k_dim, v_dim, 16, torch.float32), [40], [count], 0, 2)
        check(device, args)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_before_the_window_are_not_read(device: str):
    lengths, window = [200, 200], 20
    for counts in ([1, 1], [50, 50]):
        pages = Pages(lengths, 1, 16, 16, 4, torch.float32)
        args = arguments(pages, lengths, counts, window=window)
        first = (200 - counts[0] - window) // 4
        expected = paged_attention(*on(device, args))
        pages.table[:, :first] = 0  # the scratch page, full of NaN here
        assert torch.equal(paged_attention(*on(device, args)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_no_sequences(device: str):
    empty = Pages([], 2, 16, 16, 4, torch.float32)
    assert paged_attention(*on(device, arguments(empty, [], []))).shape == (0, 6, 16)
    for padding in (2, 20):
        assert paged_attention(*on(device, arguments(empty, [], [], padding))).eq(0).all()


def test_every_variant_compiles_for_sm_90():
    compiled = compile_for_sm90(
        """
from treadle.kernels import paged_attention_launch
paged_attention_launch._processors = lambda device: 132

def launch(dtype, tokens, sequences, heads, kv_heads, k_dim, v_dim, *options, sinks=None, pages=5, **more):
    page_tokens = more.pop("page_tokens", 16)
    sinks = None if sinks is None else torch.zeros(heads, dtype=dtype)
    paged_attention_launch.paged_attention(
        torch.zeros(tokens, heads, k_dim, dtype=dtype), torch.zeros(256, dtype=torch.uint8),
        torch.zeros(sequences, pages, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int32), torch.tensor(0), sinks, page_tokens, kv_heads, v_dim, 0.1,
        *options, **more, pdl=True,
    )

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    launch(dtype, 1, 1, 16, 8, 128, 128)            # decode, combine
    launch(dtype, 600, 1, 16, 8, 128, 128)          # prefill
launch(torch.bfloat16, 128, 128, 32, 8, 128, 128)   # decode, unsplit
launch(torch.bfloat16, 64, 16, 32, 8, 128, 128)     # decode, combine, prefill in turns
launch(torch.bfloat16, 8192, 1, 32, 8, 128, 128)
launch(torch.bfloat16, 4096, 1, 8, 4, 256, 256, 512, 50.0)
launch(torch.float16, 600, 2, 71, 1, 64, 64, 0, 0.0, page_tokens=3, sinks=True)
launch(torch.float32, 600, 1, 4, 1, 256, 256, 512)
launch(torch.bfloat16, 128, 16, 32, 8, 128, 128, pages=4096)       # prefill in parts
launch(torch.float16, 192, 1, 9, 3, 64, 72, 5000, 30.0, pages=4096, page_tokens=3, sinks=True)
launch(torch.float32, 100, 1, 4, 1, 256, 256, pages=4096)
launch(torch.bfloat16, 600, 2, 32, 32, 128, 128, chunk=8192, slopes=torch.zeros(32), pages=40)
"""
    )
    names = [each["name"] for each in compiled]
    both, parts = ["decode", "combine", "prefill"], ["prefill", "join"]
    rest = [*both, "prefill", *both, "join", *parts * 2, *both]
    assert names == [*both * 3, "decode", *both, "prefill", "prefill", *rest]
    assert [each["wgmma"] for each in (*compiled[12:15], compiled[21])] == [True] * 4


def history(lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(arena, table, keys, values) on the GPU: sequences of ``lengths`` tokens in 16-token pages in random order."""
    random = torch.Generator("cuda").manual_seed(0)
    counts = [-(-length // 16) for length in lengths]
    page = torch.randn(1 + sum(counts), 2, kv_heads, 16, dim, generator=random, device="cuda").to(dtype)
    page[0] = float("nan")
    order = torch.randperm(sum(counts), generator=random, device="cuda") + 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    keys, values = [], []
    for sequence, (pages, length) in enumerate(zip(order.split(counts), lengths)):
        table[sequence, : len(pages)] = pages * (page[0].nbytes // 256)
        k, v = page[pages].transpose(0, 1).transpose(2, 3).flatten(1, 2)
        page[pages[-1], :, :, length - 16 * (len(pages) - 1) :] = float("nan")
        keys.append(k[:length])
        values.append(v[:length])
    return page.view(-1).view(torch.uint8), table, keys, values


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0) -> torch.Tensor:
    """Attention of the last tokens of a sequence, in float64, by blocks of queries."""
    blocks = []
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    for block in torch.arange(len(q), device="cuda").split(512):
        at = k.shape[1] - len(q) + block[:, None]
        t = torch.arange(k.shape[1], device="cuda")
        seen = (t <= at) & ((at - t < window) if window else True)
        logits = (q[block].double().transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        blocks.append((logits.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (8, 4, 256), (9, 3, 64)])
@pytest.mark.parametrize("window", [0, 300])
def test_real_sizes(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int):
    for lengths, counts in (
        ([1000], [1]), ([1000, 17, 4000, 1], [1, 1, 1, 1]), ([700, 1000, 64, 33], [700, 1, 64, 1]), ([3000], [1100]),
        ([9000], [40]), ([20000, 500, 6000, 3000], [110, 1, 300, 1]),
    ):  # fmt: skip
        arena, table, keys, values = history(lengths, kv_heads, dim, dtype)
        q = torch.randn(sum(counts), heads, dim, device="cuda").to(dtype)
        meta = (starts(counts).cuda(), torch.tensor(lengths, dtype=torch.int32).cuda(), torch.tensor(0).cuda())
        for pdl in (False, True):
            got = paged_attention(q, arena, table, *meta, None, 16, kv_heads, dim, dim**-0.5, window, 0.0, pdl=pdl)
            for mine, queries, k, v in zip(got.split(counts), q.split(counts), keys, values):
                expected = exact(queries, k, v, dim**-0.5, window).to(dtype)
                torch.testing.assert_close(mine, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batches",
    [([1, 1, 1, 1], [1, 1, 0, 0]), ([40, 1, 1, 0], [1, 20, 0, 5]), ([1, 20, 0, 25], [40, 1, 1, 0])],
)
def test_a_captured_step_serves_any_lengths(batches: tuple[list[int], list[int]]):
    first, second = batches
    arena, table, keys, values = history([9000, 900, 77, 2000], 8, 128, torch.bfloat16)
    q = torch.randn(sum(first), 32, 128, device="cuda").bfloat16()
    q_starts, kv_lens = starts(first).cuda(), torch.tensor([100, 900, 77, 0], dtype=torch.int32).cuda()
    rest = (torch.tensor(0).cuda(), None, 16, 8, 128, 0.1)

    def step() -> torch.Tensor:
        return paged_attention(q, arena, table, q_starts, kv_lens, *rest, pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    q.normal_()
    q_starts.copy_(starts(second))
    kv_lens.copy_(torch.tensor([9000, 850, 0, 1999]))
    graph.replay()
    assert torch.isfinite(out).all()
    for sequence, (count, length) in enumerate(zip(second, kv_lens.tolist())):
        rows = slice(int(q_starts[sequence]), int(q_starts[sequence + 1]))
        if count and length:
            expected = exact(q[rows], keys[sequence][:length], values[sequence][:length], 0.1).bfloat16()
            torch.testing.assert_close(out[rows], expected, atol=2e-2, rtol=2e-2)
        else:
            assert not out[rows].any()
    assert not out[sum(second) :].any()
