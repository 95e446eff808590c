"""What every part of a description is made of: strict structs, numbers with limits, norms and rope tables."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from treadle.conf.errors import ConfigError


class SpecError(ConfigError):
    """A family description or config.json that does not describe a decoder: where, what, and the nearest valid name."""


LARGEST = 2**31 - 1
"""what kernels count with has 32 bits"""

Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
"""a number of channels, heads, tokens, ..."""
Even = Annotated[int, msgspec.Meta(ge=2, le=LARGEST, multiple_of=2)]
"""a number of channels that go in pairs"""
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
"""a size that may be 0: off, or what another field says"""
Real = Annotated[float, msgspec.Meta(ge=-3.4e38, le=3.4e38)]
"""finite in 32 bits, as the others are"""
Magnitude = Annotated[float, msgspec.Meta(ge=0, le=3.4e38)]
"""0: off"""
Positive = Annotated[float, msgspec.Meta(gt=0, le=3.4e38)]

Activation = Literal[
    "silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2",
    "sigmoid", "tanh", "softplus", "linear", "none",
]  # fmt: skip
"""config.json's names of what ``kernels.activation`` computes"""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a description: frozen, and refusing fields that it does not know."""


class Norm(Data, frozen=True, kw_only=True):
    """A normalisation over the last dim, computed in fp32."""

    kind: Literal["rms", "layer", "l2"] = "rms"
    eps: Positive = 1e-6
    plus_one: bool = False
    """the stored weight is w - 1"""
    groups: Size = 1
    """normalise this many equal parts of the channels apart"""
    gate_act: Activation | None = None
    """multiply by act(gate)"""
    gate_first: bool = False
    """the gate comes before the normalisation"""
    low_rank_gate: bool = False
    """times sigmoid(gate_up silu(gate_down y)), y what the norm gives"""
    cast: Literal["after", "before"] = "after"
    """after: cast to x's dtype, then multiply by the weight (llama); before: multiply in fp32, then cast (gemma)"""
    weight: bool = True
    """a weight tensor must exist"""
    bias: bool = False
    """a bias tensor must exist; one that merely does is used all the same"""


class QKNorm(Norm, frozen=True, kw_only=True):
    """A normalisation of queries and keys, weights ``q_norm`` and ``k_norm``."""

    scope: Literal["head", "each_head", "full"] = "head"
    """over a head with one weight for all of them, with a weight for each, or over all heads together"""
    after_rope: bool = False


class Scaling(Data, frozen=True, kw_only=True):
    """How rotary frequencies are stretched, in config.json's names."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Real | None = None
    mscale_all_dim: Real | None = None
    truncate: bool = True
    short_factor: tuple[Positive, ...] = ()
    long_factor: tuple[Positive, ...] = ()
    partial_rotary_factor: Positive = 1.0
    alpha: Positive | None = None


class RopeTable(Data, frozen=True, kw_only=True):
    """Rotary angles of ``dim`` channels; equal tables are the same constant."""

    dim: Even
    theta: Positive = 10000.0
    rounded: bool = True
    """cosines and sines are rounded to the model's dtype, as most families do; false: they stay float32"""
    scaling: Scaling = Scaling()
    original_positions: Size | None = None
    """positions before stretching, where config.json says it outside of the scaling"""
    max_positions: Size | None = None
    """positions the model was made for; dynamic, yarn and longrope ask for it"""

    def __post_init__(self) -> None:
        """Refuse a stretching that lacks a value which it is computed from."""
        scaling, kind = self.scaling, self.scaling.rope_type
        grows = kind == "dynamic" and scaling.alpha is None
        for divisors in (scaling.short_factor, scaling.long_factor) if kind == "longrope" else ():
            if len(divisors) != self.dim // 2:
                raise SpecError(f"longrope needs {self.dim // 2} short and long factors, not {len(divisors)}")
        if kind in ("linear", "llama3") or grows:
            self._need("factor", scaling.factor)
        if grows:
            self._need("max_positions", self.trained)
        if kind in ("llama3", "yarn", "longrope"):
            self._need("original_max_position_embeddings", self.original)
        if kind in ("yarn", "longrope") and scaling.attention_factor is None:
            self._need("factor or max_positions", scaling.factor or self.max_positions)
        if kind == "yarn" and self.theta <= 1:
            raise SpecError(f"yarn rope needs a theta above 1, not {self.theta}")
        if kind == "longrope" and self.original == 1:
            raise SpecError("longrope needs original_max_position_embeddings above 1")
        if kind == "dynamic" and self.dim == 2:
            raise SpecError("dynamic rope needs more than 2 channels")

    @property
    def trained(self) -> int:
        """Positions that frequencies of the dynamic kind start to change at, 0 if nothing says."""
        return self.scaling.max_position_embeddings or self.max_positions or 0

    @property
    def original(self) -> int:
        """Positions before stretching, 0 if nothing says; files that leave it out mean the maximum."""
        return self.scaling.original_max_position_embeddings or self.original_positions or self.max_positions or 0

    @property
    def factor(self) -> float:
        """How much longer sequences became; 1 if nothing says."""
        longest = self.max_positions or self.original
        return self.scaling.factor or (longest / self.original if self.original else 1.0)

    def _need(self, name: str, value: float | None) -> None:
        if not value:
            raise SpecError(f"{self.scaling.rope_type} rope needs {name}")
