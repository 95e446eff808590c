"""block_attention, paged_block_attention: attention over blocks of keys that a small attention chooses (MiniMax M3).

    score[h, i, b] = max_{j in block b, j <= i} index_q[i, h] . index_k[j];  the last ``local`` blocks count most
    a query head of index head h sees keys j <= i in the ``topk`` blocks with the highest scores

Query heads share index heads as they share kv heads. In fp32, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.cache_write import elements
from treadle.kernels.registry import dtypes_of, register_reference
from treadle.kernels.skinny import DTYPES
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def choose_blocks(index_q: Tensor, index_k: Tensor, positions: Tensor, block: int, topk: int, local: int) -> Tensor:
    """Return which keys each index head of each query sees, bool [HI, T, S].

    Shapes: index_q [T, HI, DI] at ``positions`` [T]; index_k [S, DI].
    """
    length, count = len(index_k), -(-len(index_k) // block)
    places = torch.arange(length, device=index_k.device)
    seen = places <= positions.view(-1, 1)
    scores = torch.einsum("thd,sd->hts", index_q.float(), index_k.float()).masked_fill(~seen, float("-inf"))
    padded = F.pad(scores, (0, count * block - length), value=float("-inf"))
    best = padded.view(*padded.shape[:2], count, block).amax(-1)
    if local:
        near = (positions.view(-1, 1) // block - torch.arange(local, device=positions.device)).clamp(min=0)
        best = best.scatter(-1, near.expand(len(best), -1, -1), float("inf"))
    found = best.topk(min(topk, count), -1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, found.indices, found.values > float("-inf"))
    return kept.repeat_interleave(block, -1)[..., :length] & seen


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return the attention of one sequence's queries, in fp32: q [T, H, D], k, v [S, K, ...], visible [HI, T, S]."""
    queries, heads, k_dim = q.shape
    length, kv_heads, v_dim = v.shape
    grouped = q.float().view(queries, kv_heads, -1, k_dim).permute(1, 2, 0, 3)
    logits = (grouped @ k.float().permute(1, 2, 0).unsqueeze(1) * scale).view(heads, queries, length)
    visible = visible.repeat_interleave(heads // len(visible), 0)
    shares = logits.masked_fill(~visible, float("-inf")).softmax(-1).view(kv_heads, -1, queries, length)
    result = shares @ v.float().permute(1, 0, 2).unsqueeze(1)
    return result.permute(2, 0, 1, 3).reshape(queries, heads, v_dim)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, kv: Tensor, keys: Tensor, seq_ids: Tensor,
    positions: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, block: int, topk: int, local: int,
) -> Tensor:  # fmt: skip
    """Append this step's keys, values and side keys, then return the attention of every query.

    Shapes: q [T, H, D]; k [T, K, D]; v [T, K, Dv]; index_q [T, HI, DI]; index_k [T, DI]; kv [B, L, K, D + Dv];
    keys [B, L, 1, DI]; result [T, H, Dv].
    """
    live, k_dim = positions >= 0, k.shape[-1]
    where = (seq_ids[live].long(), positions[live])
    kv[where] = torch.cat([k, v], -1)[live].to(kv.dtype)
    keys[where] = index_k[live].unsqueeze(1).to(keys.dtype)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    starts = q_starts.tolist()
    for sequence, length in enumerate(kv_lens.tolist()):
        at = slice(starts[sequence], starts[sequence + 1])
        if length == 0 or at.start == at.stop:
            continue
        visible = choose_blocks(index_q[at], keys[sequence, :length, 0], positions[at], block, topk, local)
        history = kv[sequence, :length]
        out[at] = attend_blocks(q[at], history[..., :k_dim], history[..., k_dim:], visible, scale).to(q.dtype)
    return out


def paged_block_attention(
    q: Tensor, index_q: Tensor, arena: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor,
    layer_offset: Tensor, keys_offset: Tensor, page_tokens: int, kv_heads: int, v_dim: int, scale: float, block: int,
    topk: int, local: int,
) -> Tensor:  # fmt: skip
    """Return the same over the pages of each sequence. Shapes: as ``paged_attention``; index_q [T, HI, DI]."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_dim)
    cache, size = arena.view(q.dtype), q.element_size()
    starts = q_starts.tolist()
    for sequence, length in enumerate(kv_lens.tolist()):
        at = slice(starts[sequence], starts[sequence + 1])
        count = at.stop - at.start
        if length == 0 or count == 0:
            continue
        tokens = torch.arange(length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        side, _ = elements(pages, tokens, keys_offset, page_tokens, 1, index_q.shape[-1], 0, size)
        keys, values = elements(pages, tokens, layer_offset, page_tokens, kv_heads, q.shape[-1], v_dim, size)
        positions = torch.arange(length - count, length, device=q.device)
        visible = choose_blocks(index_q[at], cache[side].squeeze(1), positions, block, topk, local)
        out[at] = attend_blocks(q[at], cache[keys], cache[values], visible, scale).to(q.dtype)
    return out


def _one_type(target: Target, attrs: Mapping[str, Any]) -> bool:
    dtypes = dtypes_of(target, attrs, "q", "index_q")
    return len(dtypes) == 1 and dtypes <= DTYPES


register_reference("block_attention", block_attention, inline=False)
register_reference("paged_block_attention", paged_block_attention, inline=False)
register_triton("paged_block_attention", "paged_block_attention_triton", _one_type, invariant=True)
