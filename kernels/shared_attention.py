"""shared_attention: attention over keys and values of another layer, which has appended this step's before.

The math is that of ``attention``. Placed in the arena it is ``paged_attention`` alone.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.attention import attend
from treadle.kernels.registry import register_reference


def shared_attention(
    q: Tensor,
    kv: Tensor,
    seq_ids: Tensor,  # noqa: ARG001  (the tail of attention)
    positions: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    sinks: Tensor | None,
    v_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return the attention of every query over a history. Shapes: q [T, H, Dk]; kv [B, L, K, Dk + Dv]; [T, H, Dv]."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_dim)
    starts, lengths, k_dim = q_starts.tolist(), kv_lens.tolist(), q.shape[-1]
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        history = kv[sequence, :length]
        out[rows] = attend(
            q[rows], history[..., :k_dim], history[..., k_dim:], positions[rows], sinks, scale, window, softcap, chunk,
            slopes,
        ).to(q.dtype)  # fmt: skip
    return out


register_reference("shared_attention", shared_attention, inline=False)
