"""A weight that a description asks for, and those that linear layers and norms have. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treadle.graph.primitives import Norm


@dataclass(frozen=True)
class Expected:
    """A weight that the description asks for. -1 in ``shape``: any size.

    ``kind`` says how random ones are made: ``matrix`` with a deviation of 1 / sqrt(columns), ``embedding``, ``norm``
    near 1 (near 0 where 1 is added to it), ``bias`` small, ``ids`` whole numbers from 0 on.
    """

    shape: tuple[int, ...]
    kind: str = "matrix"
    required: bool = True
    """False for biases that are used where they exist"""


def linear(path: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Expected]]:
    """Yield a matrix [rows, columns] and its bias, which must exist if ``bias`` says so."""
    yield f"{path}.weight", Expected((rows, columns))
    yield f"{path}.bias", Expected((rows,), "bias", bias)


def norm(path: str, given: Norm | None, *shape: int) -> Mapping[str, Expected]:
    """Return the weights of a norm over ``shape``; none where there is no norm."""
    if given is None or given.kind == "l2":
        return {}
    kind = "norm_minus_one" if given.plus_one else "norm"
    gate = {"gate_down": (-1, *shape), "gate_up": (*shape, -1)} if given.low_rank_gate else {}
    return {
        **{f"{path}.{name}.weight": Expected(sizes) for name, sizes in gate.items()},
        f"{path}.weight": Expected(shape, kind, given.weight),
        f"{path}.bias": Expected(shape, "bias", given.bias),
    }
