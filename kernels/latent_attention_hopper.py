"""Latent attention over pages for Hopper: some warps fetch keys, some weigh them, some add up what they weigh.

Work, workspace and results are those of ``latent_attention_triton``, whose ``join`` joins the splits. A tile of 64
(query, head) rows needs half of the registers for its sums, [64, 512] in float32, and 72 KiB of shared memory for its
queries; two blocks of 64 keys take another 144 KiB. So the work is parted by what is done, not by rows:

    fetch     four warps have the copy engine bring pages, a fourth of the keys of a block each
    weigh     four warps multiply queries and keys, pieces of channels as they arrive, and pass weights on
    add up    twice four warps add up the values of a block, half of the channels each, while the next one is weighed

One warp alone would take longer to ask for a block than the matrix units need for it.

Measured on one H200, bfloat16, 128 heads, pages of 16 tokens: 64 sequences of 8192 keys in 269 us, 544 TFLOP/s, where
Triton's own pipeline reaches 169. Triton's interpreter does not run Gluon: ``make test-gpu`` compares its results.
"""

# Gluon's language has no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treadle.kernels.latent_attention_items import UNSPLIT, find, share_of, work
from treadle.kernels.paged_prefill_hopper import COLUMNS, NOTHING, RENAMED, async_load

ROWS = 64
"""(query, head) rows of a tile"""
BLOCK = 64
"""keys of a block"""
STAGES = 2
"""blocks in shared memory"""
K_DIM, V_DIM = 576, 512
"""channels that the kernel is written for: of a key, and of the latent in it"""
PAGES = (8, 16, 32, 64, 128)
"""tokens of a page"""
REGISTERS = 128
"""a thread has at launch: all that a multiprocessor has, over four groups of warps; then they are dealt out anew"""
DEALT = (176, 120, 40, 40, 40, 40)
"""registers of a thread that adds (the other half gets what remains), weighs, fetches"""

PARTS = gl.constexpr(9)
"""of a key: those of the latent, then the rope key's"""
PIECES = gl.constexpr(5)
"""of a block that are waited for: rope keys, then fourths of the latents"""


@gluon.jit
def _fetch(
    arena, ropes, parts, ready, free, pages, layer, begin, blocks, hi, done,
    SHARE: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Bring a fourth of the keys of each block from ``begin`` on into the buffers, as these become free.

    A page may begin anywhere among multiples of 256 bytes, a row has 9 x 128: the parts of a page's tokens lie in one
    column of the arena all the same, though not in the rows and columns that the tokens' own would be.
    """
    TOKENS: gl.constexpr = BN // 4
    BOX: gl.constexpr = min(PAGE, TOKENS)
    last = gl.maximum(hi - 1, 0)
    for n in range(blocks):
        slot = (done + n) % DEPTH
        again = ((done + n) // DEPTH & 1) ^ 1
        at = ()
        for i in gl.static_range(TOKENS // BOX):
            # Past the end, the last page again: what is copied is never looked at.
            t = gl.minimum(begin + n * BN + SHARE * TOKENS + i * BOX, last)
            unit = (gl.load(pages + t // PAGE) + layer) * 2
            row = unit // PARTS
            at = at + (row + t % PAGE // BOX * BOX, unit - row * PARTS)  # type: ignore[assignment] # noqa: RUF005
        for piece in gl.static_range(PIECES):
            mbarrier.wait(free.index(slot * PIECES + piece), again)
            mbarrier.expect(ready.index(slot * PIECES + piece), TOKENS * COLUMNS * (2 if piece == 0 else 4))
            for part in gl.static_range(PARTS - 1 if piece == 0 else piece * 2 - 2, PARTS if piece == 0 else piece * 2):
                for i in gl.static_range(TOKENS // BOX):
                    over = at[2 * i + 1] + part >= PARTS
                    row = at[2 * i] + over.to(gl.int32)
                    column = at[2 * i + 1] + part - gl.where(over, PARTS, 0)
                    there = ropes.index(slot) if piece == 0 else parts.index(slot * (PARTS - 1) + part)
                    there = there.slice(SHARE * TOKENS + i * BOX, BOX)
                    async_load(arena, [row, column * COLUMNS], ready.index(slot * PIECES + piece), there)


@gluon.jit
def _multiply(
    q_rope, q_latent, ropes, latents, ready, n, LOGITS: gl.constexpr, BN: gl.constexpr, DEPTH: gl.constexpr
):  # fmt: skip
    """Return the products of queries and of the n-th block's keys, whose pieces are multiplied as they arrive."""
    slot = n % DEPTH
    s = gl.zeros([64, BN], gl.float32, layout=LOGITS)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(ready.index(slot * PIECES + piece), n // DEPTH & 1)
        if piece == 0:
            s = warpgroup_mma(q_rope, ropes.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
        else:
            keys = latents.index(slot * 4 + piece - 1)
            s = warpgroup_mma(q_latent.index(piece - 1), keys.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _pass_on(
    s, top, total, weights, shrinks, passed, taken, n, t, hi, at, scale, MASKED: gl.constexpr, LOGITS: gl.constexpr
):
    """Weigh a block whose first key is ``t`` and pass the weights on, with what earlier sums are to shrink by."""
    factor = scale * 1.4426950408889634
    if MASKED:
        key = t + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LOGITS))
        seen = (key < hi)[None, :] & (key[None, :] <= at[:, None])
        s = gl.where(seen, s * factor, NOTHING)
        new_top = gl.maximum(top, gl.max(s, 1))
        # A row that has seen no key yet has the same maximum as what is hidden from it.
        p = gl.where(seen, gl.exp2(s - new_top[:, None]), 0.0)
    else:
        new_top = gl.maximum(top, gl.max(s, 1) * factor)
        p = gl.exp2(s * factor - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    mbarrier.wait(taken, (n & 1) ^ 1)
    weights.store(p.to(weights.dtype))
    shrinks.store(shrink)
    fence_async_shared()
    mbarrier.arrive(passed, count=1)
    return new_top, total * shrink + gl.sum(p, 1)


@gluon.jit
def _weigh(
    q_rope, q_latent, ropes, latents, asked, ready, free, weights, shrinks, shares, passed, taken, closed, stats,
    sinks, tile, count, length, begin, blocks, whole, hi, place, splits, done, turn, scale,
    HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, BN: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Weigh the tile's blocks of keys; leave what its rows sum up to."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    token = (tile * 64 + row) // HEADS
    at = length - count + token
    top = gl.full([64], NOTHING, gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    mbarrier.wait(asked, turn & 1)
    s = _multiply(q_rope, q_latent, ropes, latents, ready, done, LOGITS, BN, DEPTH)
    mbarrier.arrive(free.index(done % DEPTH * PIECES), count=1)
    plain = gl.minimum(whole, blocks - 1)
    for n in range(plain):
        top, total = _pass_on(
            s, top, total, weights, shrinks, passed, taken, done + n, begin + n * BN, hi, at, scale, False, LOGITS
        )  # fmt: skip
        s = _multiply(q_rope, q_latent, ropes, latents, ready, done + n + 1, LOGITS, BN, DEPTH)
        mbarrier.arrive(free.index((done + n + 1) % DEPTH * PIECES), count=1)
    for n in range(plain, blocks - 1):
        top, total = _pass_on(
            s, top, total, weights, shrinks, passed, taken, done + n, begin + n * BN, hi, at, scale, True, LOGITS
        )  # fmt: skip
        s = _multiply(q_rope, q_latent, ropes, latents, ready, done + n + 1, LOGITS, BN, DEPTH)
        mbarrier.arrive(free.index((done + n + 1) % DEPTH * PIECES), count=1)
    n = blocks - 1
    top, total = _pass_on(
        s, top, total, weights, shrinks, passed, taken, done + n, begin + n * BN, hi, at, scale, True, LOGITS
    )  # fmt: skip
    share = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, LOGITS))
    if splits > 1:
        gl.store(stats + place * 128 + row, top, mask=token < count)
        gl.store(stats + place * 128 + 64 + row, total, mask=token < count)
    else:
        some = top > 0.5 * NOTHING
        if HAS_SINKS:
            sink = gl.load(sinks + (tile * 64 + row) % HEADS).to(gl.float32) * 1.4426950408889634
            new_top = gl.maximum(top, sink)
            share = gl.exp2(top - new_top)
            total = total * share + gl.exp2(sink - new_top)
        share = gl.where(some, share / gl.where(some, total, 1.0), 0.0)
    shares.store(share)
    mbarrier.arrive(closed, count=1)


@gluon.jit
def _ask(
    q, q_rope, q_parts, asked, first, tile, count, q_stride, FROM: gl.constexpr, TO: gl.constexpr, HEADS: gl.constexpr
):
    """Bring parts FROM .. TO - 1 of the tile's queries into shared memory."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    row = q + (first + flat // HEADS).to(gl.int64) * q_stride + flat % HEADS * (PARTS * COLUMNS)
    inside = flat // HEADS < count
    for part in gl.static_range(FROM, TO):
        c = part * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LOAD))
        line = gl.load(row[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        there = q_rope if part == PARTS - 1 else q_parts.index(part)
        there.store(line)
    fence_async_shared()
    mbarrier.arrive(asked, count=1)


@gluon.jit
def _add(
    latents, ready, free, weights, shrinks, taken, left, right, n,
    HALF: gl.constexpr, DEPTH: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """Add a block's values, weighed, to what is there of those before."""
    slot = n % DEPTH
    shrink = shrinks.load(gl.SliceLayout(1, RESULT))[:, None]
    left, right = left * shrink, right * shrink
    mbarrier.wait(ready.index(slot * PIECES + 1 + HALF), n // DEPTH & 1)
    mbarrier.wait(ready.index(slot * PIECES + 3 + HALF), n // DEPTH & 1)
    left = warpgroup_mma(weights, latents.index(slot * 4 + HALF), left, is_async=True)
    right = warpgroup_mma(weights, latents.index(slot * 4 + 2 + HALF), right, is_async=True)
    left = warpgroup_mma_wait(1, deps=(left,))
    mbarrier.arrive(free.index(slot * PIECES + 1 + HALF), count=1)
    right = warpgroup_mma_wait(0, deps=(right,))
    mbarrier.arrive(free.index(slot * PIECES + 3 + HALF), count=1)
    mbarrier.arrive(taken, count=1)
    return left, right


@gluon.jit
def _add_up(
    q, q_rope, q_parts, parts, latents, asked, ready, free, weights, shrinks, shares, passed, taken, closed, out,
    partial, first, tile, count, begin, blocks, hi, place, splits, done, turn, q_stride,
    HALF: gl.constexpr, HEADS: gl.constexpr, BN: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Add up two fourths of the values' channels, for all rows of the tile."""
    WIDTH: gl.constexpr = 2 * COLUMNS
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _ask(q, q_rope, q_parts, asked, first, tile, count, q_stride, HALF * 5, 5 + HALF * 4, HEADS)
    left = gl.zeros([64, WIDTH], gl.float32, layout=RESULT)
    right = gl.zeros([64, WIDTH], gl.float32, layout=RESULT)
    for n in range(blocks - 1):
        mbarrier.wait(passed, (done + n) & 1)
        left, right = _add(latents, ready, free, weights, shrinks, taken, left, right, done + n, HALF, DEPTH, RESULT)
    n = blocks - 1
    mbarrier.wait(passed, (done + n) & 1)
    if begin + blocks * BN > hi:
        # Rows without a token may hold anything, even NaN, which no weight of 0 takes away.
        t = begin + n * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, LOAD))
        slot = (done + n) % DEPTH
        for i in gl.static_range(4):
            piece = HALF + i // 2 * 2
            mbarrier.wait(ready.index(slot * PIECES + 1 + piece), (done + n) // DEPTH & 1)
            last = parts.index(slot * (PARTS - 1) + piece * 2 + i % 2)
            last.store(gl.where((t < hi)[:, None], last.load(LOAD), 0.0))
        fence_async_shared()
    left, right = _add(latents, ready, free, weights, shrinks, taken, left, right, done + n, HALF, DEPTH, RESULT)
    mbarrier.wait(closed, turn & 1)
    share = shares.load(gl.SliceLayout(1, RESULT))[:, None]
    left, right = left * share, right * share
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    c = HALF * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, RESULT))
    flat = tile * 64 + row
    inside = (flat // HEADS < count)[:, None]
    if splits > 1:
        there = ((place.to(gl.int64) * 64 + row) * (4 * WIDTH))[:, None] + c[None, :]
        gl.store(partial + there, left, mask=inside)
        gl.store(partial + there + 2 * WIDTH, right, mask=inside)
    else:
        there = ((first.to(gl.int64) * HEADS + flat) * (4 * WIDTH))[:, None] + c[None, :]
        gl.store(out + there, left.to(weights.dtype), mask=inside)
        gl.store(out + there + 2 * WIDTH, right.to(weights.dtype), mask=inside)


@gluon.jit(do_not_specialize=["most", "least_keys", "num_rows", "num_seqs", "table_stride"])
def attend(
    arena, q, out, partial, stats, page_table, q_starts, kv_lens, layer_offset, sinks,
    most, least_keys, num_rows, num_seqs, q_stride, table_stride, scale,
    SPLIT: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, HAS_SINKS: gl.constexpr, BN: gl.constexpr,
    DEPTH: gl.constexpr, DEALT: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, that take turns at the work there is. arena: its bytes as rows of 576 channels."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q.dtype.element_ty
    q_rope = gl.allocate_shared_memory(dtype, [64, COLUMNS], SHARED)
    q_parts = gl.allocate_shared_memory(dtype, [PARTS - 1, 64, COLUMNS], SHARED)
    ropes = gl.allocate_shared_memory(dtype, [DEPTH, BN, COLUMNS], SHARED)
    parts = gl.allocate_shared_memory(dtype, [DEPTH * (PARTS - 1), BN, COLUMNS], SHARED)
    # The same bytes: 128 channels of a block lie in memory as parts of COLUMNS channels, one after the other.
    if RENAMED:
        q_latent = q_parts.reinterpret(dtype, [4, 64, 2 * COLUMNS], SHARED)
        latents = parts.reinterpret(dtype, [DEPTH * 4, BN, 2 * COLUMNS], SHARED)
    else:
        q_latent = q_parts._reinterpret(dtype, [4, 64, 2 * COLUMNS], SHARED)
        latents = parts._reinterpret(dtype, [DEPTH * 4, BN, 2 * COLUMNS], SHARED)
    weights = gl.allocate_shared_memory(dtype, [64, BN], SHARED)
    shrinks = gl.allocate_shared_memory(gl.float32, [64], LINE)
    shares = gl.allocate_shared_memory(gl.float32, [64], LINE)
    ready = gl.allocate_shared_memory(gl.int64, [DEPTH * PIECES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [DEPTH * PIECES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    closed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH * PIECES):
        mbarrier.init(ready.index(i), count=4)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(asked, count=2)
    mbarrier.init(passed, count=1)
    mbarrier.init(taken, count=2)
    mbarrier.init(closed, count=1)
    fence_async_shared()
    share = num_seqs * 0 + UNSPLIT
    if SPLIT:
        share = share_of(q_starts, kv_lens, num_rows, num_seqs, most, least_keys, HEADS)
    _, _, _, items = find(num_seqs * 0 - 1, share, q_starts, kv_lens, num_rows, num_seqs, HEADS)
    layer = (gl.load(layer_offset) // 256).to(gl.int32)
    # Blocks and items that this program has done: barriers go on where they are.
    done = num_seqs * 0
    turn = num_seqs * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, number, places, _ = find(item, share, q_starts, kv_lens, num_rows, num_seqs, HEADS)
        tiles, keys = work(sequence, q_starts, kv_lens, num_rows, num_seqs, HEADS)
        splits = gl.maximum(keys // share, 1)
        # Neighbours share keys in the L2 cache; late queries, which see most keys, go first.
        tile = tiles - 1 - number % tiles
        split = number // tiles
        first = gl.load(q_starts + sequence)
        end = gl.load(q_starts + sequence + 1, mask=sequence < num_seqs, other=num_rows)
        count = end - first
        earliest = tile * 64 // HEADS
        latest = gl.minimum((tile * 64 + 63) // HEADS, count - 1)
        hi = gl.minimum(keys - count + latest + 1, keys)
        # As the kernel of Triton's deals them out; a split without any key takes one block, of which it sees nothing.
        length = gl.cdiv(gl.cdiv(gl.maximum(hi, 0), splits), BN) * BN
        begin = split * length
        hi = gl.minimum(begin + length, hi)
        blocks = gl.maximum(gl.cdiv(hi - begin, BN), 1)
        whole = gl.maximum(gl.minimum(keys - count + earliest + 1, hi) - begin, 0) // BN
        # Rows past the last sequence read no page of their own.
        pages = page_table + gl.minimum(sequence, num_seqs - 1).to(gl.int64) * table_stride
        place = places + number
        gl.warp_specialize(
            [
                (_add_up, (
                    q, q_rope, q_parts, parts, latents, asked, ready, free, weights, shrinks, shares, passed, taken,
                    closed, out, partial, first, tile, count, begin, blocks, hi, place, splits, done, turn, q_stride,
                    0, HEADS, BN, DEPTH,
                )),
                (_add_up, (
                    q, q_rope, q_parts, parts, latents, asked, ready, free, weights, shrinks, shares, passed, taken,
                    closed, out, partial, first, tile, count, begin, blocks, hi, place, splits, done, turn, q_stride,
                    1, HEADS, BN, DEPTH,
                )),
                (_weigh, (
                    q_rope, q_latent, ropes, latents, asked, ready, free, weights, shrinks, shares, passed, taken,
                    closed, stats, sinks, tile, count, keys, begin, blocks, whole, hi, place, splits, done, turn,
                    scale, HEADS, HAS_SINKS, BN, DEPTH,
                )),
                (_fetch, (arena, ropes, parts, ready, free, pages, layer, begin, blocks, hi, done, 0, PAGE, BN, DEPTH)),
                (_fetch, (arena, ropes, parts, ready, free, pages, layer, begin, blocks, hi, done, 1, PAGE, BN, DEPTH)),
                (_fetch, (arena, ropes, parts, ready, free, pages, layer, begin, blocks, hi, done, 2, PAGE, BN, DEPTH)),
                (_fetch, (arena, ropes, parts, ready, free, pages, layer, begin, blocks, hi, done, 3, PAGE, BN, DEPTH)),
            ],
            [4, 4, 1, 1, 1, 1],
            DEALT,
        )  # fmt: skip
        done += blocks
        turn += 1


def launch(
    q: Tensor, out: Tensor, partial: Tensor, stats: Tensor, arena: Tensor, page_table: Tensor, q_starts: Tensor,
    kv_lens: Tensor, layer_offset: Tensor, sinks: Tensor, *, programs: int, splits: int, least_keys: int, scale: float,
    page_tokens: int, has_sinks: bool,
) -> None:  # fmt: skip
    """Launch attend: ``programs`` take turns at tiles and, where ``splits`` is not 0, at up to so many splits of them.

    Shapes: as ``paged_latent_attention``'s, arena in q's dtype; workspace as the kernel of Triton's for tiles of ROWS.
    """
    tokens, heads, k_dim = q.shape
    # No page lies in the row that the arena's last bytes may begin.
    shape = [-(-arena.numel() // k_dim), k_dim]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = TensorDescriptor(arena, shape, [k_dim, 1], [min(page_tokens, BLOCK // 4), COLUMNS.value], layout)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": REGISTERS}
    attend[(programs,)](
        described, q, out, partial, stats, page_table, q_starts, kv_lens, layer_offset, sinks, splits, least_keys,
        tokens, kv_lens.shape[0], q.stride(0), page_table.stride(0), scale, SPLIT=splits > 0, HEADS=heads,
        PAGE=page_tokens, HAS_SINKS=has_sinks, BN=BLOCK, DEPTH=STAGES, DEALT=DEALT, **options,
    )  # fmt: skip
