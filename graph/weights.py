"""Weight expressions: what a program needs in memory, as data. Passes rewrite them, ``runtime.weights`` loads them.

Equal expressions are the same tensor and are loaded once. No torch here: dtypes are torch's names without the prefix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from treadle.graph.spec import RopeTable

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4, "int64": 8}
"""Bytes of one element of each dtype that a program may hold."""


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


class _Sized:
    @property
    def nbytes(self: _Shaped) -> int:
        """Bytes of the loaded tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Leaf(_Sized):
    """A canonical weight of the checkpoint, converted to ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"{self.name}:{self.dtype}"


@dataclass(frozen=True)
class Concat(_Sized):
    """Parts of one dtype, joined along ``dim``."""

    parts: tuple[WeightExpr, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        first = self.parts[0]
        others = [part.shape[: self.dim] + part.shape[self.dim + 1 :] for part in self.parts]
        assert len(set(others)) == 1, f"shapes {[part.shape for part in self.parts]} do not join along dim {self.dim}"
        assert all(part.dtype == first.dtype for part in self.parts), "parts of different dtypes do not join"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def dtype(self) -> str:
        """Element type of the loaded tensor."""
        return self.parts[0].dtype

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"concat({self.dim}, {', '.join(part.key for part in self.parts)})"


@dataclass(frozen=True)
class Int8(_Sized):
    """One of the two tensors that a matrix [N, K], or a stack of them, quantises to.

    int8 of the same shape, or float32 scales [..., N, K / group].
    """

    part: WeightExpr
    group: int
    what: Literal["weight", "scale"] = "weight"

    def __post_init__(self) -> None:
        assert len(self.part.shape) >= 2, f"no matrices: {self.part.shape}"
        assert self.part.shape[-1] % self.group == 0, f"groups of {self.group} do not divide {self.part.shape[-1]}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        *rows, columns = self.part.shape
        return (*rows, columns if self.what == "weight" else columns // self.group)

    @property
    def dtype(self) -> str:
        """Element type of the loaded tensor."""
        return "int8" if self.what == "weight" else "float32"

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"int8_{self.what}({self.part.key}, {self.group})"


@dataclass(frozen=True)
class Cast(_Sized):
    """The part in another dtype."""

    part: WeightExpr
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return self.part.shape

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"cast({self.part.key}, {self.dtype})"


@dataclass(frozen=True)
class NegativeExp(_Sized):
    """-exp(part) in float32: rates of decay, of which a checkpoint holds logarithms."""

    part: WeightExpr

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return self.part.shape

    @property
    def dtype(self) -> str:
        """Element type of the loaded tensor."""
        return "float32"

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"negative_exp({self.part.key})"


@dataclass(frozen=True)
class Runs(_Sized):
    """A vector of constants: each value as often as its count says."""

    runs: tuple[tuple[int, float], ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return (sum(count for count, _ in self.runs),)

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"runs({self.runs}, {self.dtype})"


@dataclass(frozen=True)
class RopeRows(_Sized):
    """Rotary angles of positions 0 .. rows - 1: float32 [rows, R] = cos [R/2] ++ sin [R/2].

    Tables that depend on a sequence's length (dynamic, longrope) are fixed for ``rows``, the longest sequence served.
    """

    table: RopeTable
    rows: int
    rounding: str = "float32"
    """the dtype that values are rounded to first"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return (self.rows, self.table.dim)

    @property
    def dtype(self) -> str:
        """Element type of the loaded tensor."""
        return "float32"

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"rope({self.table}, {self.rows}, {self.rounding})"


@dataclass(frozen=True)
class SineRows(_Sized):
    """Sinusoidal position vectors: [rows, dim], sines then cosines; see graph.rope.sine_rows for ``endpoint``."""

    dim: int
    rows: int
    endpoint: bool
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return (self.rows, self.dim)

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"sine({self.dim}, {self.rows}, {self.endpoint}, {self.dtype})"


@dataclass(frozen=True)
class AlibiSlopes(_Sized):
    """How fast each head's scores fall with distance, times ``factor``: float32 [heads]."""

    heads: int
    max_bias: float
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return (self.heads,)

    @property
    def dtype(self) -> str:
        """Element type of the loaded tensor."""
        return "float32"

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"alibi({self.heads}, {self.max_bias}, {self.factor})"


@dataclass(frozen=True)
class Ints(_Sized):
    """A small int64 constant, such as a layer's offset inside a page."""

    values: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the loaded tensor."""
        return (len(self.values),)

    @property
    def dtype(self) -> str:
        """Element type of the loaded tensor."""
        return "int64"

    @property
    def key(self) -> str:
        """A short text that tells this expression from any other of the same checkpoint."""
        return f"ints({', '.join(map(str, self.values))})"


WeightExpr = Leaf | Concat | Int8 | Cast | NegativeExp | Runs | RopeRows | SineRows | AlibiSlopes | Ints
"""Everything that a program's placeholder for a weight may be bound to."""


def leaves(expr: WeightExpr) -> tuple[Leaf, ...]:
    """Return the checkpoint weights that an expression reads, in reading order."""
    match expr:
        case Leaf():
            return (expr,)
        case Concat(parts=parts):
            return tuple(leaf for part in parts for leaf in leaves(part))
        case Int8(part=part) | Cast(part=part) | NegativeExp(part=part):
            return leaves(part)
        case _:
            return ()
