"""A decoder as data: the vocabulary of the family descriptions, with the values of one checkpoint and of each layer.

`treadle.graph.family.load_spec` makes a `ModelSpec` from a family's YAML and a config.json. Every struct is frozen and
refuses unknown fields. Zero means "off" for windows, caps and clips. Weight names follow the structure:
``embed.weight``, ``layers.{i}.{sub}.pre.weight``, ``layers.{i}.{sub}.q.weight``, ``final_norm.weight``,
``head.weight``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from treadle.graph.feedforward import Feedforward, Groups, Latent, Mlp, Moe, Router, Shared
from treadle.graph.mixers import (
    Alibi,
    Attention,
    Compress,
    CompressIndex,
    Csa,
    DecayAttention,
    Delta,
    Differential,
    Gate,
    Index,
    Mamba1,
    Mamba2,
    Mla,
    Relative,
    Rglru,
    Rwkv4,
    ShortConv,
    Temperature,
)
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
    Scaling,
    Size,
    SpecError,
)

__all__ = [
    "Alibi",
    "Attention",
    "Branch",
    "Compress",
    "CompressIndex",
    "Csa",
    "DecayAttention",
    "Delta",
    "Differential",
    "Embed",
    "EndTokens",
    "Feedforward",
    "Gate",
    "Groups",
    "Head",
    "Index",
    "Latent",
    "Layer",
    "Mamba1",
    "Mamba2",
    "Mla",
    "Mlp",
    "ModelSpec",
    "Moe",
    "Mtp",
    "MtpCombine",
    "MtpHead",
    "Norm",
    "Op",
    "PerLayerInput",
    "Positions",
    "QKNorm",
    "Quant",
    "Relative",
    "Residual",
    "Rglru",
    "RopeTable",
    "Router",
    "Rule",
    "Rwkv4",
    "Scaling",
    "Shared",
    "ShortConv",
    "Sizes",
    "SpecError",
    "Split",
    "Sub",
    "Temperature",
]


class Sizes(Data, frozen=True, kw_only=True):
    """The sizes that the whole decoder shares."""

    hidden: Size
    vocab: Size
    max_positions: Size
    """tokens of the longest sequence that the model was made for"""


class EndTokens(Data, frozen=True, kw_only=True):
    """What config.json says about the end of an answer."""

    eos_token_id: Count | tuple[Count, ...] = ()


class Positions(Data, frozen=True, kw_only=True):
    """Position vectors added to the embedding."""

    kind: Literal["learned", "sinusoidal"] = "learned"
    offset: Count = 0
    """row of the table that position 0 has"""
    endpoint: bool = True
    """sinusoidal: whether the slowest wave is theta long (xglm), or a step less (ctrl)"""


class Embed(Data, frozen=True, kw_only=True):
    """Token ids to hidden states."""

    scale: Real = 1.0
    """rounded to the weight's dtype before the product"""
    norm: Norm | None = None
    positions: Positions | None = None
    width: Count = 0
    """channels of the table, where they are not those of the hidden state: projected behind it and before the head"""


class Head(Data, frozen=True, kw_only=True):
    """Hidden states to logits: softcap(scale * W(in_scale * x))."""

    tied: bool = False
    """the weight is the embedding's"""
    bias: bool = False
    in_scale: Real = 1.0
    scale: Real = 1.0
    softcap: Magnitude = 0.0


class Residual(Data, frozen=True, kw_only=True):
    """How a sublayer reads from, and writes to, the residual stream(s)."""

    kind: Literal["add", "mhc", "hc_diag", "attn_res"] = "add"
    streams: Size = 1
    iters: Size = 1
    eps: Positive = 1e-6
    norm_eps: Positive = 1e-6
    magnitude: Real = 1.0
    block: Size = 1


Op = Attention | Mla | Delta | Mamba2 | Mamba1 | ShortConv | Mlp | Moe | Csa | DecayAttention | Rglru | Rwkv4
"""Every kind of sublayer, told apart by the key ``op``."""


class Branch(Data, frozen=True, kw_only=True):
    """One of several ops that read the same input and whose outputs add up; weights at ``layers.{i}.{name}``."""

    name: str
    op: Op
    pre: Norm | None = None
    post: Norm | None = None
    in_scale: Real = 1.0
    scale: Real = 1.0


class Sub(Data, frozen=True, kw_only=True):
    """A sublayer: x = skip_scale * x + out_scale * post(op(pre(x))), weights at ``layers.{i}.{name}``."""

    name: str
    op: Op | None = None
    branches: tuple[Branch, ...] = ()
    """instead of ``op``"""
    pre: Norm | None = None
    post: Norm | None = None
    skip_scale: Real = 1.0
    out_scale: Real = 1.0
    residual_from: Literal["input", "normed"] = "input"
    post_residual: Norm | None = None
    post_conv: bool = False
    tap: str | None = None
    source: str | None = msgspec.field(default=None, name="from")
    hold: str | None = None
    add: str | None = None
    snapshot: bool = False
    input: Literal["hidden", "concat_embed"] = "hidden"


class Layer(Data, frozen=True, kw_only=True):
    """The sublayers of one layer, in order; equal layers compare equal but for ``index``."""

    index: int
    kind: str | None = None
    """the name that config.json or the description gives to this kind of layer"""
    subs: tuple[Sub, ...]


class PerLayerInput(Data, frozen=True, kw_only=True):
    """A second embedding that every layer reads its own slice of."""

    dim: Size
    act: Activation
    norm: Norm


class MtpCombine(Data, frozen=True, kw_only=True):
    """How a draft layer joins the hidden state and the next token's embedding."""

    norms: tuple[Norm, ...]
    project: str


class MtpHead(Data, frozen=True, kw_only=True):
    """The head of a draft layer."""

    norm: Norm | None = None
    share: tuple[str, ...] = ()


class Mtp(Data, frozen=True, kw_only=True):
    """Draft layers that predict further tokens."""

    count: Count = 0
    combine: MtpCombine | None = None
    layer: tuple[Sub, ...] = ()
    head: MtpHead | None = None


class Quant(Data, frozen=True, kw_only=True):
    """How the checkpoint packs its weights."""

    format: str
    skip: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


class Split(Data, frozen=True, kw_only=True):
    """View ``dim`` as [groups, sum(sizes)] and split inside each group; sizes may be relative; a null target drops."""

    dim: int = 0
    groups: Size = 1
    sizes: tuple[int, ...]
    to: tuple[str | None, ...]


class Rule(Data, frozen=True, kw_only=True):
    """Where tensors whose whole name matches ``m`` go; transforms in the order t, scale, reshape, gsplit, post_t."""

    m: str
    to: str | None = None
    """``\\1`` is the first group; a final ``[\\2]`` stacks numbered pieces into one tensor"""
    drop: bool = False
    """the tensor may exist and is not read"""
    t: bool = False
    """swap the last two axes first"""
    post_t: bool = False
    """swap the last two axes last"""
    gsplit: Split | None = None
    reshape: tuple[int, ...] | None = None
    """one -1 stands for what is left"""
    scale: float | None = None
    layers: tuple[int, ...] | None = None
    """only where the first group is one of these"""
    quant: Literal["mxfp4"] | None = None
    """how values are packed; the rule takes their scales too, and the transforms see what they stand for"""


class ModelSpec(Data, frozen=True, kw_only=True):
    """One decoder, resolved: nothing per family is left to ask."""

    family: str
    hidden: int
    vocab: int
    max_positions: int
    """tokens of the longest sequence that the model was made for"""
    embed: Embed
    final_norm: Norm | None
    head: Head
    residual: Residual = Residual()
    layers: tuple[Layer, ...]
    layer_scalar: bool = False
    per_layer_input: PerLayerInput | None = None
    mtp: Mtp | None = None
    quant: Quant | None = None
    strip: tuple[str, ...] = ()
    """patterns removed from tensor names before the rules see them"""
    rules: tuple[Rule, ...]
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """config.json's text part, with what the description fills in"""
