"""What mixers with a state of fixed size hold inside a step, as data. No torch here."""

from __future__ import annotations

from treadle.graph.spec import Delta, Mamba1, Mamba2, Op, ShortConv


def recurrent_width(op: Op, hidden: int, item: int) -> int:
    """Return channels of ``item`` bytes that live at once inside such an op, a token; 0 for other ops.

    What is convolved, before and behind it; decays and step sizes as they are given and in float32; the result, its
    gate, and their product.
    """
    wide = 4 // item
    match op:
        case Delta():
            decays = op.v_heads * (op.k_dim if op.decay == "channel" else 1)
            values = op.v_heads * op.v_dim
            return 2 * sum(op.channels) + decays * (1 + wide) + op.v_heads * (2 + wide) + 3 * values
        case Mamba2():
            scaled = sum(op.channels) if set(op.in_scales) != {1.0} else 0
            return 2 * sum(op.channels) + scaled + op.heads * (1 + wide) + 3 * op.inner
        case Mamba1():
            return op.inner * (6 + wide) + 2 * (op.dt_rank + 2 * op.state)
        case ShortConv():
            return 6 * hidden
        case _:
            return 0
