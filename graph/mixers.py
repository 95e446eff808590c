"""The ops that mix tokens of a sequence: attention, latent attention, linear attention, recurrences, convolutions."""

from __future__ import annotations

from typing import Literal

import msgspec

from treadle.graph.primitives import (
    Activation,
    Count,
    Data,
    Magnitude,
    Norm,
    Positive,
    QKNorm,
    Real,
    RopeTable,
    Size,
)


class Gate(Data, frozen=True, kw_only=True):
    """act(W x) times the attention output, before the output projection."""

    act: Activation = "sigmoid"
    per: Literal["element", "head"] = "element"
    source: Literal["hidden", "q_lora"] = msgspec.field(default="hidden", name="from")


class Temperature(Data, frozen=True, kw_only=True):
    """Queries times 1 + beta * log(1 + floor((position + shift) / length))."""

    beta: Real
    length: Size
    shift: int = 0


class Index(Data, frozen=True, kw_only=True):
    """A sparse choice of keys, made by a small attention of its own."""

    kind: Literal["dsa", "block"]
    heads: Size
    dim: Size
    topk: Size
    q_from: Literal["hidden", "q_lora"] = "hidden"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: RopeTable | None = None
    layout: Literal["half", "interleaved", "half_neg"] = "half"
    at: Literal["head", "tail"] = "head"
    share: bool = False
    """reuse the previous layer's choice"""
    block: Count = 0
    local: Count = 0


class Relative(Data, frozen=True, kw_only=True):
    """A learned bias by distance, up to ``extent``."""

    extent: Size


class Differential(Data, frozen=True, kw_only=True):
    """(1 - init) rms(a1 - lambda a2): the attentions of the two halves of the heads, over pairs of values.

    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + init, from weights of those names.
    """

    init: Real
    eps: Positive = 1e-6


class Alibi(Data, frozen=True, kw_only=True):
    """Scores lowered by distance, each head by its own slope: 2 ** (-max_bias / H * (h + 1)) for powers of two."""

    max_bias: Positive = 8.0
    scaled: bool = False
    """slopes are multiplied by the scale of the scores too (falcon)"""


class Attention(Data, frozen=True, kw_only=True, tag_field="op", tag="attention"):
    """Softmax attention over paged keys and values; weights q, k, v, o (and q_norm, k_norm, sinks, gate, ...)."""

    heads: Size
    kv_heads: Count = 0
    """0 becomes ``heads``"""
    head_dim: Size
    v_head_dim: Count = 0
    """0 becomes ``head_dim``"""
    bias: bool = False
    """q, k and v must have biases; one that merely exists is used all the same"""
    o_bias: bool = False
    rope: RopeTable | None = None
    layout: Literal["half", "interleaved", "half_neg"] = "half"
    rope_at: Literal["head", "tail"] = "head"
    window: Count = 0
    """a query sees keys at distance < window; 0: all"""
    chunk: Count = 0
    """a query sees keys of its own span of so many positions; 0: all"""
    scale: Magnitude = 0.0
    """0 becomes head_dim ** -0.5"""
    softcap: Magnitude = 0.0
    qk_norm: QKNorm | None = None
    v_norm: Norm | None = None
    out_norm: Norm | None = None
    gate: Gate | None = None
    sinks: bool = False
    alibi: Alibi | None = None
    clip: Magnitude = 0.0
    q_temperature: Temperature | None = None
    k_scale: Real = 1.0
    v_scale: Real = 1.0
    v_from_k: bool = False
    kv_from: Count | None = None
    """the layer whose keys and values are read instead of own ones"""
    k_conv: bool = False
    rel: Relative | None = None
    diff: Differential | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        """Fill what follows from the other fields."""
        set_field = msgspec.structs.force_setattr
        if not self.kv_heads:
            set_field(self, "kv_heads", self.heads)
        if not self.v_head_dim:
            set_field(self, "v_head_dim", self.head_dim)
        if not self.scale:
            set_field(self, "scale", self.head_dim**-0.5)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"rope turns {self.rope.dim} channels of {self.head_dim}")
        if self.diff is not None and (self.heads % 2 or self.kv_heads % 2):
            raise ValueError("a differential attention needs an even number of heads and kv_heads")
        if self.v_from_k and self.v_head_dim != self.head_dim:
            raise ValueError(f"values are keys, so v_head_dim {self.v_head_dim} must be head_dim {self.head_dim}")

    @property
    def cached_v_dim(self) -> int:
        """Channels of a value as the cache holds it; a differential attention keeps pairs of values."""
        return self.v_head_dim * (1 if self.diff is None else 2)


class Mla(Data, frozen=True, kw_only=True, tag_field="op", tag="mla"):
    """Multi-head latent attention; cache = latent and rope key."""

    heads: Size
    q_lora: Size | None = None
    kv_lora: Size
    nope: Size
    rope_dim: Size
    v_dim: Size
    rope: RopeTable | None = None
    layout: Literal["half", "interleaved", "half_neg"] = "interleaved"
    lora_norm: Norm = Norm()
    scale: Magnitude = 0.0
    """0 becomes (nope + rope_dim) ** -0.5"""
    q_lora_scale: Real = 1.0
    kv_lora_scale: Real = 1.0
    q_concat_raw: bool = False
    gate: Gate | None = None
    sinks: bool = False
    window: Count = 0
    index: Index | None = None

    def __post_init__(self) -> None:
        """Fill what follows from the other fields."""
        if not self.scale:
            msgspec.structs.force_setattr(self, "scale", (self.nope + self.rope_dim) ** -0.5)


class Delta(Data, frozen=True, kw_only=True, tag_field="op", tag="delta"):
    """The gated delta rule, with a decay per head or per channel; weights q, k, v, z, beta, decay, o and so on."""

    decay: Literal["head", "channel"]
    k_heads: Size
    v_heads: Size
    k_dim: Size
    v_dim: Size
    conv: Size = 4
    """tokens that the short convolutions of queries, keys and values see"""
    act: Activation = "silu"
    """behind the convolutions"""
    decay_rank: bool = False
    """the decay is a product of two narrow matrices, decay_a and decay_b"""
    gate_rank: bool = False
    """so is the gate: z_a and z_b"""
    decay_floor: Real | None = None
    """the lowest logarithm of a decay, which is then a sigmoid of its input"""
    beta_scale: Real = 1.0
    out_norm: Norm

    def __post_init__(self) -> None:
        """Refuse heads that do not share keys evenly."""
        if self.v_heads % self.k_heads:
            raise ValueError(f"v_heads {self.v_heads} is not a multiple of k_heads {self.k_heads}")

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        keys = self.k_heads * self.k_dim
        return keys, keys, self.v_heads * self.v_dim


class Mamba2(Data, frozen=True, kw_only=True, tag_field="op", tag="mamba2"):
    """The Mamba-2 mixer; weights z, xbc, dt, conv, A_log, D, dt_bias, o, out_norm."""

    heads: Size
    head_dim: Size
    state: Size
    groups: Size
    conv: Size = 4
    """tokens that the short convolution of x, B and C sees"""
    act: Activation = "silu"
    """behind the convolution"""
    bias: bool = False
    """z, xbc and dt must have biases; one that merely exists is used all the same"""
    conv_bias: bool = False
    o_bias: bool = False
    dt_limit: tuple[float, float] | None = None
    in_scale: Real = 1.0
    in_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """of z, x, B, C, dt"""
    out_norm: Norm | None = None
    """None: the output is multiplied by silu(z) alone"""

    def __post_init__(self) -> None:
        """Refuse heads that do not share groups evenly."""
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of groups {self.groups}")

    @property
    def inner(self) -> int:
        """Channels of x and z."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of x, B and C."""
        return self.inner, self.groups * self.state, self.groups * self.state


class Mamba1(Data, frozen=True, kw_only=True, tag_field="op", tag="mamba1"):
    """The Mamba mixer; weights x, z, conv, dt_in, B, C, dt, A_log, D, o, and dt_norm, B_norm, C_norm."""

    inner: Size
    """channels of x and z"""
    state: Size
    dt_rank: Size
    conv: Size = 4
    """tokens that the short convolution of x sees"""
    act: Activation = "silu"
    """behind the convolution"""
    bias: bool = False
    """x, z and o must have biases; one that merely exists is used all the same"""
    conv_bias: bool = False
    inner_norm: Norm | None = None
    """of the inputs of dt, B and C"""


class ShortConv(Data, frozen=True, kw_only=True, tag_field="op", tag="short_conv"):
    """o(C * conv(B * x)); weights B, C, x, conv, o."""

    kernel: Size
    bias: bool = False
    """all must have biases; one that merely exists is used all the same"""


class CompressIndex(Data, frozen=True, kw_only=True):
    """The choice among compressed rows."""

    heads: Size
    dim: Size
    topk: Size


class Compress(Data, frozen=True, kw_only=True):
    """One cached row for every ``rate`` tokens."""

    rate: Size
    overlap: bool = False
    index: CompressIndex | None = None


class Csa(Data, frozen=True, kw_only=True, tag_field="op", tag="csa"):
    """A window beside compressed keys."""

    heads: Size
    head_dim: Size
    o_groups: Size
    window: Count
    norm: Norm
    rope: RopeTable
    compress: Compress | None = None


class DecayAttention(Data, frozen=True, kw_only=True, tag_field="op", tag="decay_attention"):
    """Linear attention with a fixed decay per head."""

    heads: Size
    head_dim: Size
    layers: Size
    out_norm: Norm


class Rglru(Data, frozen=True, kw_only=True, tag_field="op", tag="rglru"):
    """The real-gated linear recurrent unit."""

    heads: Size


class Rwkv4(Data, frozen=True, kw_only=True, tag_field="op", tag="rwkv4"):
    """The two halves of an RWKV-4 layer."""

    part: Literal["time", "channel"]
