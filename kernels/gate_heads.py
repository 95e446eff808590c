"""gate_heads: an output gate with one value for each head.

out[t, h] = x[t, h] * act(gate[t, h])
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.activation import activation
from treadle.kernels.registry import register_reference


def gate_heads(x: Tensor, gate: Tensor, act: str) -> Tensor:
    """Return the gated heads. Shapes: x [T, H, D]; gate [T, H]. Raises: UnknownActivationError."""
    return x * activation(gate, act).unsqueeze(-1)


register_reference("gate_heads", gate_heads, inline=True)
