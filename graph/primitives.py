"""What every part of a description is made of: strict structs, norms and rope tables."""

from __future__ import annotations

from typing import Literal

import msgspec

from treadle.conf.errors import ConfigError


class SpecError(ConfigError):
    """A family description or config.json that does not describe a decoder: where, what, and the nearest valid name."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a description: frozen, and refusing fields that it does not know."""


class Norm(Data, frozen=True, kw_only=True):
    """A normalisation over the last dim, computed in fp32."""

    kind: Literal["rms", "layer", "l2"] = "rms"
    eps: float = 1e-6
    plus_one: bool = False
    """the stored weight is w - 1"""
    groups: int = 1
    """normalise this many equal parts of the channels apart"""
    gate_act: str | None = None
    """multiply by act(gate)"""
    gate_first: bool = False
    """the gate comes before the normalisation"""
    low_rank_gate: bool = False
    cast: Literal["after", "before"] = "after"
    """after: cast to x's dtype, then multiply by the weight (llama); before: multiply in fp32, then cast (gemma)"""
    weight: bool = True
    """a weight tensor must exist"""
    bias: bool = False
    """a bias tensor must exist; one that merely does is used all the same"""


class QKNorm(Norm, frozen=True, kw_only=True):
    """A normalisation of queries and keys, weights ``q_norm`` and ``k_norm``."""

    scope: Literal["head", "full"] = "head"
    after_rope: bool = False


class Scaling(Data, frozen=True, kw_only=True):
    """How rotary frequencies are stretched, in config.json's names."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    max_position_embeddings: int | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    alpha: float | None = None


class RopeTable(Data, frozen=True, kw_only=True):
    """Rotary angles of ``dim`` channels; equal tables are the same constant."""

    dim: int
    theta: float = 10000.0
    scaling: Scaling = Scaling()
    max_positions: int | None = None
    """positions the model was made for; dynamic, yarn and longrope ask for it"""
