"""The prefill kernel of paged_attention for Hopper: one warp fetches pages while two groups of warps compute.

Tiles and results are those of ``paged_prefill_triton``, without splits. One warp has the copy engine bring whole pages
of keys and values into shared memory. Each group of four warps takes half of a tile's rows; it adds up the values of
one block of keys while it weighs the keys of the next, and the two groups drift apart, so that the matrix units rarely
wait for a softmax (FlashAttention-3: Shah et al., https://arxiv.org/abs/2407.08608).

Measured on one H200, bfloat16, heads of 128, pages of 16 tokens: 8192 tokens over 24576 in 5.6 ms, 682 TFLOP/s, where
Triton's own pipeline reaches 464. Triton's interpreter does not run Gluon: ``make test-gpu`` compares its results.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Names changed in Triton 3.7.
if hasattr(tma, "async_load"):
    async_load = tma.async_load
else:
    async_load = tma.async_copy_global_to_shared

ROWS = 128
"""(query, head) rows of a tile"""
BLOCK = 128
"""keys of a block"""
STAGES = 2
"""blocks of keys, and of values, in shared memory"""
DIMS = (64, 128)
"""channels of a head that the kernel is written for; of keys and of values"""
PAGES = (8, 16, 32, 64, 128)
"""tokens of a page"""
REGISTERS = 168
"""a thread has at launch: all that a multiprocessor has, over three groups of warps; then they are dealt out anew"""

NOTHING = gl.constexpr(-1e30)
COLUMNS = gl.constexpr(64)
"""16-bit channels that the copy engine brings at a time: as many as it swizzles together"""
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""here too"""


@gluon.jit
def _produce(
    arena, k_parts, v_parts, k_ready, k_free, v_ready, v_free, pages, k_row, v_row, start, hi,
    BN: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, UNIT: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Bring the blocks of keys and values start .. into the buffers, as they become free."""
    PARTS: gl.constexpr = DIM // COLUMNS
    for n in range(gl.cdiv(hi, BN) - start):
        slot = n % DEPTH
        free = (n // DEPTH & 1) ^ 1
        first = (start + n) * (BN // PAGE)
        last = (hi - 1) // PAGE
        mbarrier.wait(k_free.index(slot), free)
        mbarrier.expect(k_ready.index(slot), BN * DIM * 2)
        for i in gl.static_range(BN // PAGE):
            # Past the end, the last page again: what is copied is never looked at.
            row = gl.load(pages + gl.minimum(first + i, last)) * UNIT + k_row
            for part in gl.static_range(PARTS):
                async_load(
                    arena,
                    [row, part * COLUMNS],
                    k_ready.index(slot),
                    k_parts.index(slot * PARTS + part).slice(i * PAGE, PAGE),
                )
        mbarrier.wait(v_free.index(slot), free)
        mbarrier.expect(v_ready.index(slot), BN * DIM * 2)
        for i in gl.static_range(BN // PAGE):
            row = gl.load(pages + gl.minimum(first + i, last)) * UNIT + v_row
            for part in gl.static_range(PARTS):
                async_load(
                    arena,
                    [row, part * COLUMNS],
                    v_ready.index(slot),
                    v_parts.index(slot * PARTS + part).slice(i * PAGE, PAGE),
                )


@gluon.jit
def _weigh(
    s, top, total, i, hi, at, scale,
    MASKED: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, LOGITS: gl.constexpr,
):  # fmt: skip
    """Turn the products of queries and keys of block i into weights; also return by what earlier results shrink."""
    log2e: gl.constexpr = 1.4426950408889634
    if SOFTCAP > 0.0:
        x = s * (scale / SOFTCAP)
        e = gl.exp2(gl.abs(x) * (-2.0 * log2e))
        tanh = (1.0 - e) / (1.0 + e)
        s = gl.where(x < 0, -tanh, tanh) * (SOFTCAP * log2e)
        factor = 1.0
    else:
        factor = scale * log2e
    if MASKED:
        t = i * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
        seen = (t < hi)[None, :] & (t[None, :] <= at[:, None])
        if WINDOW > 0:
            seen = seen & (at[:, None] - t[None, :] < WINDOW)
        s = gl.where(seen, s * factor, NOTHING)
        new_top = gl.maximum(top, gl.max(s, 1))
        p = gl.exp2(s - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.max(s, 1) * factor)
        p = gl.exp2(s * factor - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return p, shrink, new_top, total * shrink + gl.sum(p, 1)


@gluon.jit
def _step(
    q, keys, values, k_ready, k_free, v_ready, v_free, p, acc, top, total, n, start, hi, at, scale,
    MASKED: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, DEPTH: gl.constexpr,
    LOGITS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """Weigh the keys of the n-th block while the values of the block before, weighed by p, are added to the result."""
    slot = n % DEPTH
    before = (n - 1) % DEPTH
    none = gl.zeros([64, BN], gl.float32, layout=LOGITS)
    mbarrier.wait(k_ready.index(slot), n // DEPTH & 1)
    s = warpgroup_mma(q, keys.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), (n - 1) // DEPTH & 1)
    sums = warpgroup_mma(p, values.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_free.index(slot), count=1)
    weights, shrink, top, total = _weigh(s, top, total, start + n, hi, at, scale, MASKED, BN, WINDOW, SOFTCAP, LOGITS)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    p = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, RESULT, 2))
    return p, acc, top, total


@gluon.jit
def _consume(
    q, keys, values, k_ready, k_free, v_ready, v_free, out, sinks, first, begin, count, length, kv_head, start, hi,
    seen, scale, HALF: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr,
    BN: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Compute rows HALF * 64 .. of the tile."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    # Rows without a query of their own see what the tile's last one sees; nobody reads them.
    at = length - count + begin + row // GROUP
    whole = gl.maximum(length - count + begin + 1, 0) // BN - start
    if WINDOW > 0:
        whole = 0
    blocks = gl.cdiv(hi, BN) - start
    mbarrier.wait(k_ready.index(0), 0)
    s = gl.zeros([64, BN], gl.float32, layout=LOGITS)
    s = warpgroup_mma(q, keys.index(0).permute((1, 0)), s, use_acc=False)
    mbarrier.arrive(k_free.index(0), count=1)
    top = gl.full([64], NOTHING, gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    weights, shrink, top, total = _weigh(s, top, total, start, hi, at, scale, True, BN, WINDOW, SOFTCAP, LOGITS)
    p = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, RESULT, 2))
    acc = gl.zeros([64, DIM], gl.float32, layout=RESULT)
    for n in range(1, whole):
        p, acc, top, total = _step(
            q, keys, values, k_ready, k_free, v_ready, v_free, p, acc, top, total, n, start, hi, at, scale,
            False, BN, WINDOW, SOFTCAP, DEPTH, LOGITS, RESULT,
        )  # fmt: skip
    for n in range(gl.maximum(whole, 1), blocks):
        p, acc, top, total = _step(
            q, keys, values, k_ready, k_free, v_ready, v_free, p, acc, top, total, n, start, hi, at, scale,
            True, BN, WINDOW, SOFTCAP, DEPTH, LOGITS, RESULT,
        )  # fmt: skip
    n = blocks - 1
    mbarrier.wait(v_ready.index(n % DEPTH), n // DEPTH & 1)
    # Rows without a token may hold anything, even NaN, which no weight of 0 takes away.
    last = values.index(n % DEPTH)
    if (start + blocks) * BN > seen:
        t = (start + n) * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, LOAD))
        last.store(gl.where((t < seen)[:, None], last.load(LOAD), 0.0))
        fence_async_shared()
    acc = warpgroup_mma(p, last, acc)
    head = kv_head * GROUP + row % GROUP
    none = top <= 0.5 * NOTHING
    if HAS_SINKS:
        log2e: gl.constexpr = 1.4426950408889634
        sink = gl.load(sinks + head).to(gl.float32) * log2e
        new_top = gl.maximum(top, sink)
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.exp2(sink - new_top)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    share = gl.where(none, 0.0, 1.0 / gl.where(none, 1.0, total))
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, RESULT))[:, None]
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    c = gl.arange(0, DIM, layout=gl.SliceLayout(0, RESULT))
    token = begin + row // GROUP
    inside = (row < TOKENS * GROUP) & (token < count)
    place = (first + token).to(gl.int64) * HEADS + kv_head * GROUP + row % GROUP
    gl.store(out + (place * DIM)[:, None] + c[None, :], acc.to(keys.dtype), mask=inside[:, None])


@gluon.jit(do_not_specialize=["tiles", "num_rows", "num_seqs", "table_stride"])
def prefill(
    arena, q, out, page_table, q_starts, kv_lens, layer_offset, sinks,
    tiles, num_rows, num_seqs, q_stride, table_stride, scale,
    LEAST: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BN: gl.constexpr,
    PAGE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Grid: ``tiles`` x kv heads. arena: its bytes as rows of DIM channels. Otherwise as the kernel of Triton's."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOKENS: gl.constexpr = 128 // GROUP
    UNIT: gl.constexpr = 128 // DIM
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = DIM // COLUMNS
    dtype: gl.constexpr = q.dtype.element_ty
    item = gl.program_id(0)
    kv_head = item // tiles
    tile = tiles - 1 - item % tiles
    sequence = num_seqs * 0
    above = num_seqs + 1
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if gl.load(q_starts + middle) // TOKENS + middle <= tile:
            sequence = middle
        else:
            above = middle
    first = gl.load(q_starts + sequence)
    real = sequence < num_seqs
    end = gl.load(q_starts + sequence + 1, mask=real, other=num_rows)
    length = gl.load(kv_lens + sequence, mask=real, other=0)
    count = end - first
    begin = (tile - first // TOKENS - sequence) * TOKENS
    if (begin < count) & ((count >= LEAST) | (sequence == num_seqs)):
        queries = gl.allocate_shared_memory(dtype, [2, 64, DIM], SHARED)
        for half in gl.static_range(2):
            row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
            c = gl.arange(0, DIM, layout=gl.SliceLayout(0, LOAD))
            token = begin + row // GROUP
            inside = (row < TOKENS * GROUP) & (token < count)
            q_at = (first + token).to(gl.int64) * q_stride + (kv_head * GROUP + row % GROUP) * DIM
            queries.index(half).store(gl.load(q + q_at[:, None] + c[None, :], mask=inside[:, None], other=0.0))
        fence_async_shared()
        k_parts = gl.allocate_shared_memory(dtype, [DEPTH * PARTS, BN, COLUMNS], SHARED)
        v_parts = gl.allocate_shared_memory(dtype, [DEPTH * PARTS, BN, COLUMNS], SHARED)
        # The same bytes: a block of DIM channels lies in memory as parts of COLUMNS channels, one after the other.
        if RENAMED:
            keys = k_parts.reinterpret(dtype, [DEPTH, BN, DIM], SHARED)
            values = v_parts.reinterpret(dtype, [DEPTH, BN, DIM], SHARED)
        else:
            keys = k_parts._reinterpret(dtype, [DEPTH, BN, DIM], SHARED)
            values = v_parts._reinterpret(dtype, [DEPTH, BN, DIM], SHARED)
        k_ready = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(DEPTH):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        layer_row = (gl.load(layer_offset) // (DIM * 2)).to(gl.int32)
        k_row = layer_row + kv_head * PAGE
        v_row = layer_row + (KV_HEADS + kv_head) * PAGE
        # Rows past the last sequence read no page of their own.
        pages = page_table + gl.minimum(sequence, num_seqs - 1).to(gl.int64) * table_stride
        seen = gl.minimum(length - count + begin + TOKENS, length)
        # A tile without any key takes one block, of which it sees nothing.
        hi = gl.maximum(seen, 1)
        start = 0
        if WINDOW > 0:
            start = gl.maximum(length - count + begin - (WINDOW - 1), 0) // BN
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        queries.index(0), keys, values, k_ready, k_free, v_ready, v_free, out, sinks, first, begin,
                        count, length, kv_head, start, hi, seen, scale, 0, HEADS, GROUP, TOKENS, DIM, BN, WINDOW,
                        SOFTCAP, HAS_SINKS, DEPTH,
                    ),
                ),
                (
                    _consume,
                    (
                        queries.index(1), keys, values, k_ready, k_free, v_ready, v_free, out, sinks, first, begin,
                        count, length, kv_head, start, hi, seen, scale, 1, HEADS, GROUP, TOKENS, DIM, BN, WINDOW,
                        SOFTCAP, HAS_SINKS, DEPTH,
                    ),
                ),
                (
                    _produce,
                    (
                        arena, k_parts, v_parts, k_ready, k_free, v_ready, v_free, pages, k_row, v_row, start, hi, BN,
                        DIM, PAGE, UNIT, DEPTH,
                    ),
                ),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def launch(
    q: Tensor, out: Tensor, arena: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, layer_offset: Tensor,
    sinks: Tensor, *, tiles: int, least: int, scale: float, page_tokens: int, kv_heads: int, window: int,
    softcap: float, has_sinks: bool,
) -> None:  # fmt: skip
    """Launch prefill over ``tiles`` tiles for each kv head; sequences with fewer than ``least`` queries are left out.

    Shapes: as ``paged_attention``'s, arena in q's dtype; a layer's part of a page begins at a multiple of 256 bytes.
    """
    tokens, heads, dim = q.shape
    rows = arena[: arena.numel() // dim * dim].view(-1, dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = TensorDescriptor(rows, list(rows.shape), [dim, 1], [page_tokens, COLUMNS.value], layout)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": REGISTERS}
    prefill[(tiles * kv_heads,)](
        described, q, out, page_table, q_starts, kv_lens, layer_offset, sinks, tiles, tokens, kv_lens.shape[0],
        q.stride(0), page_table.stride(0), scale, LEAST=least, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BN=BLOCK,
        PAGE=page_tokens, WINDOW=window, SOFTCAP=softcap, HAS_SINKS=has_sinks, DEPTH=STAGES, **options,
    )  # fmt: skip
