"""decay_scan on a GPU: it is ssm_scan with steps of one.

ssm_scan     S = exp(dt A) S + dt x B';  out = S C        with x = v, dt = 1, A = rates, B = k, C = q
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.ssm_scan_triton import ssm_scan


def decay_scan(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, memory: Tensor, blocks: Tensor, offset: Tensor, q_starts: Tensor,
    positions: Tensor, kv_lens: Tensor, *, pdl: bool = False, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``decay_scan``'s result. Shapes: as the reference.

    ``invariant``: every token by itself, in blocks that do not depend on the step.
    """
    # One row of ones serves all tokens. It is written just before the scan, which reads it once it has waited.
    steps = torch.ones((1, q.shape[1]), dtype=torch.float32, device=q.device).expand(q.shape[0], -1)
    # Chunks multiply states in the model's dtype. Sums over thousands of tokens that hardly fade exceed float16.
    by_token = invariant or q.dtype is torch.float16
    return ssm_scan(
        v, steps, rates, k, q, None, memory, blocks, offset, q_starts, positions, kv_lens, pdl=pdl, invariant=by_token
    )
