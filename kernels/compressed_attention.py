"""compressed_attention: attention over a window of tokens, and over one row for every ``rate`` tokens before.

    row j   = rope(norm(sum_i softmax_i(gate[i] + ape[i]) * content[i]), position j * rate)
    i over the tokens of span j; with overlap, over the first half of the channels of span j - 1 and the second half of
    span j. A query at t sees rows j < (t + 1) // rate; with an index, of these the ``topk`` with the highest
    sum_h weight[h] * relu(index_q[h] . index row j)
    out     = softmax over keys of the window, the rows seen and the sink; keys are values

In fp32, rounded once. The rows are made again in every step from what tokens have left: nothing but tokens is kept.
(transformers: DeepseekV4.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.cache_write import elements
from treadle.kernels.registry import register_reference
from treadle.kernels.rope import rope


def compress(
    content: Tensor, gate: Tensor, ape: Tensor, norm: Tensor, table: Tensor, rate: int, overlap: bool, eps: float
) -> Tensor:
    """Return the compressed rows of one sequence, in fp32.

    Shapes: content, gate [S, W]; ape [rate, W]; norm [D]; result [S // rate, D], D = W or W / 2 with ``overlap``.
    """
    count, dim = len(content) // rate, norm.shape[0]
    content = content[: count * rate].float().reshape(count, *ape.shape)
    gate = gate[: count * rate].float().reshape(count, *ape.shape) + ape.float()
    if overlap:
        before = F.pad(content[:-1, :, :dim], (0, 0, 0, 0, 1, 0))[:count]
        closed = F.pad(gate[:-1, :, :dim], (0, 0, 0, 0, 1, 0), value=float("-inf"))[:count]
        content = torch.cat([before, content[..., dim:]], 1)
        gate = torch.cat([closed, gate[..., dim:]], 1)
    rows = (content * gate.softmax(1)).sum(1)
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    places = torch.arange(count, device=rows.device) * rate
    return rope(rows.unsqueeze(1), places, table.float(), "interleaved", "tail").squeeze(1)


def attend_compressed(
    q: Tensor, rows: Tensor, positions: Tensor, sinks: Tensor | None, ape: Tensor, norm: Tensor, table: Tensor,
    index_q: Tensor | None, index_weights: Tensor | None, index_ape: Tensor | None, index_norm: Tensor | None,
    rate: int, overlap: bool, topk: int, window: int, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Return the attention of the queries of one sequence, in fp32: q [T, H, D] at ``positions`` [T], rows [S, R]."""
    dim, width = q.shape[-1], ape.shape[-1]
    keys, content, gate, rest = torch.split(rows, [dim, width, width, rows.shape[1] - dim - 2 * width], -1)
    made = compress(content, gate, ape, norm, table, rate, overlap, eps)
    places = torch.arange(len(rows), device=q.device)
    distance = positions.view(-1, 1) - places
    near = (distance >= 0) & (distance < window)
    seen = torch.arange(len(made), device=q.device) < ((positions + 1) // rate).view(-1, 1)
    if topk and len(made) > topk:
        assert index_q is not None
        assert index_weights is not None
        assert index_ape is not None
        assert index_norm is not None
        content, gate = rest.chunk(2, -1)
        small = compress(content, gate, index_ape, index_norm, table, rate, overlap, eps)
        scores = (torch.relu(torch.einsum("thd,sd->ths", index_q.float(), small)) * index_weights.unsqueeze(-1)).sum(1)
        best = scores.masked_fill(~seen, float("-inf")).topk(topk, -1).indices
        seen = seen & torch.zeros_like(seen).scatter(-1, best, True)
    every = torch.cat([keys.float().masked_fill(~near.any(0).unsqueeze(-1), 0.0), made])
    logits = torch.einsum("thd,sd->hts", q.float(), every) * scale
    logits = logits.masked_fill(~torch.cat([near, seen], 1), float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return torch.einsum("hts,sd->thd", logits.softmax(-1)[..., : len(every)], every)


def compressed_attention(
    q: Tensor, k: Tensor, kv: Tensor, seq_ids: Tensor, positions: Tensor, q_starts: Tensor, kv_lens: Tensor,
    sinks: Tensor | None, ape: Tensor, norm: Tensor, table: Tensor, index_q: Tensor | None,
    index_weights: Tensor | None, index_ape: Tensor | None, index_norm: Tensor | None, rate: int, overlap: bool,
    topk: int, window: int, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Append the rows of this step to ``kv``, then return the attention of every query.

    Shapes: as ``graph.csa_ops`` says; an index has all of its four tensors, or none.
    """
    live = positions >= 0
    kv[seq_ids[live].long(), positions[live], 0] = k[live].to(kv.dtype)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = q_starts.tolist()
    for sequence, length in enumerate(kv_lens.tolist()):
        at = slice(starts[sequence], starts[sequence + 1])
        if length == 0 or at.start == at.stop:
            continue
        queries, weights = (None if t is None else t[at] for t in (index_q, index_weights))
        out[at] = attend_compressed(
            q[at], kv[sequence, :length, 0], positions[at], sinks, ape, norm, table, queries, weights, index_ape,
            index_norm,
            rate, overlap, topk, window, scale, eps,
        ).to(q.dtype)  # fmt: skip
    return out


def paged_compressed_attention(
    q: Tensor, arena: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, layer_offset: Tensor,
    page_tokens: int, row_dim: int, sinks: Tensor | None, ape: Tensor, norm: Tensor, table: Tensor,
    index_q: Tensor | None, index_weights: Tensor | None, index_ape: Tensor | None, index_norm: Tensor | None,
    rate: int, overlap: bool, topk: int, window: int, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """Return the same over the pages of each sequence. Shapes: as ``graph.csa_ops`` says."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    cache = arena.view(q.dtype)
    starts = q_starts.tolist()
    for sequence, length in enumerate(kv_lens.tolist()):
        at = slice(starts[sequence], starts[sequence + 1])
        count = at.stop - at.start
        if length == 0 or count == 0:
            continue
        tokens = torch.arange(length, device=q.device)
        pages = page_table[sequence, tokens // page_tokens]
        places, _ = elements(pages, tokens, layer_offset, page_tokens, 1, row_dim, 0, q.element_size())
        positions = torch.arange(length - count, length, device=q.device)
        queries, weights = (None if t is None else t[at] for t in (index_q, index_weights))
        out[at] = attend_compressed(
            q[at], cache[places].squeeze(1), positions, sinks, ape, norm, table, queries, weights, index_ape,
            index_norm, rate, overlap, topk, window, scale, eps,
        ).to(q.dtype)  # fmt: skip
    return out


register_reference("compressed_attention", compressed_attention, inline=False)
register_reference("paged_compressed_attention", paged_compressed_attention, inline=False)
