"""A decoder as data: the vocabulary of the family descriptions, with the values of one checkpoint and of each layer.

`treadle.graph.family.load_spec` makes a `ModelSpec` from a family's YAML and a config.json. Every struct is frozen and
refuses unknown fields. Zero means "off" for windows, caps and clips. Weight names follow the structure:
``embed.weight``, ``layers.{i}.{sub}.pre.weight``, ``layers.{i}.{sub}.q.weight``, ``final_norm.weight``,
``head.weight``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from treadle.conf.errors import ConfigError


class SpecError(ConfigError):
    """A family description or config.json that does not describe a decoder: where, what, and the nearest valid name."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Norm(_Data, frozen=True, kw_only=True):
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


class Scaling(_Data, frozen=True, kw_only=True):
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


class RopeTable(_Data, frozen=True, kw_only=True):
    """Rotary angles of ``dim`` channels; equal tables are the same constant."""

    dim: int
    theta: float = 10000.0
    scaling: Scaling = Scaling()
    max_positions: int | None = None
    """positions the model was made for; dynamic, yarn and longrope ask for it"""


class Sizes(_Data, frozen=True, kw_only=True):
    """The sizes that the whole decoder shares."""

    hidden: int
    vocab: int
    max_positions: int
    """tokens of the longest sequence that the model was made for"""


class Positions(_Data, frozen=True, kw_only=True):
    """Position vectors added to the embedding."""

    kind: Literal["learned", "sinusoidal"] = "learned"
    offset: int = 0
    endpoint: bool = True


class Embed(_Data, frozen=True, kw_only=True):
    """Token ids to hidden states."""

    scale: float = 1.0
    """rounded to the weight's dtype before the product"""
    norm: Norm | None = None
    positions: Positions | None = None
    project: bool = False


class Head(_Data, frozen=True, kw_only=True):
    """Hidden states to logits: softcap(scale * W(in_scale * x))."""

    tied: bool = False
    """the weight is the embedding's"""
    bias: bool = False
    in_scale: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0


class Residual(_Data, frozen=True, kw_only=True):
    """How a sublayer reads from, and writes to, the residual stream(s)."""

    kind: Literal["add", "mhc", "hc_diag", "attn_res"] = "add"
    streams: int = 1
    iters: int = 1
    eps: float = 1e-6
    norm_eps: float = 1e-6
    magnitude: float = 1.0
    block: int = 1


class Gate(_Data, frozen=True, kw_only=True):
    """act(W x) times the attention output, before the output projection."""

    act: str = "sigmoid"
    per: Literal["element", "head"] = "element"
    source: Literal["hidden", "q_lora"] = msgspec.field(default="hidden", name="from")


class Temperature(_Data, frozen=True, kw_only=True):
    """Queries times 1 + beta * log(1 + floor((position + shift) / length))."""

    beta: float
    length: int
    shift: int = 0


class Index(_Data, frozen=True, kw_only=True):
    """A sparse choice of keys, made by a small attention of its own."""

    kind: Literal["dsa", "block"]
    heads: int
    dim: int
    topk: int
    q_from: Literal["hidden", "q_lora"] = "hidden"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: RopeTable | None = None
    layout: Literal["half", "interleaved", "half_neg"] = "half"
    at: Literal["head", "tail"] = "head"
    share: bool = False
    """reuse the previous layer's choice"""
    block: int = 0
    local: int = 0


class Relative(_Data, frozen=True, kw_only=True):
    """A learned bias by distance, up to ``extent``."""

    extent: int


class Differential(_Data, frozen=True, kw_only=True):
    """The difference of two attentions, normalised."""

    eps: float = 1e-6


class Attention(_Data, frozen=True, kw_only=True, tag_field="op", tag="attention"):
    """Softmax attention over paged keys and values; weights q, k, v, o (and q_norm, k_norm, sinks, gate, ...)."""

    heads: int
    kv_heads: int = 0
    """0 becomes ``heads``"""
    head_dim: int
    v_head_dim: int = 0
    """0 becomes ``head_dim``"""
    bias: bool = False
    """q, k and v must have biases; one that merely exists is used all the same"""
    o_bias: bool = False
    rope: RopeTable | None = None
    layout: Literal["half", "interleaved", "half_neg"] = "half"
    rope_at: Literal["head", "tail"] = "head"
    window: int = 0
    """a query sees keys at distance < window; 0: all"""
    chunk: int = 0
    scale: float = 0.0
    """0 becomes head_dim ** -0.5"""
    softcap: float = 0.0
    qk_norm: QKNorm | None = None
    v_norm: Norm | None = None
    out_norm: Norm | None = None
    gate: Gate | None = None
    sinks: bool = False
    alibi: Literal["plain", "prescale"] | None = None
    clip: float = 0.0
    q_temperature: Temperature | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    v_from_k: bool = False
    kv_from: int | None = None
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


class Mla(_Data, frozen=True, kw_only=True, tag_field="op", tag="mla"):
    """Multi-head latent attention; cache = latent and rope key."""

    heads: int
    q_lora: int | None = None
    kv_lora: int
    nope: int
    rope_dim: int
    v_dim: int
    rope: RopeTable | None = None
    layout: Literal["half", "interleaved", "half_neg"] = "interleaved"
    lora_norm: Norm = Norm()
    scale: float = 0.0
    """0 becomes (nope + rope_dim) ** -0.5"""
    q_lora_scale: float = 1.0
    kv_lora_scale: float = 1.0
    q_concat_raw: bool = False
    gate: Gate | None = None
    sinks: bool = False
    window: int = 0
    index: Index | None = None

    def __post_init__(self) -> None:
        """Fill what follows from the other fields."""
        if not self.scale:
            msgspec.structs.force_setattr(self, "scale", (self.nope + self.rope_dim) ** -0.5)


class Delta(_Data, frozen=True, kw_only=True, tag_field="op", tag="delta"):
    """The gated delta rule, with a decay per head or per channel."""

    decay: Literal["head", "channel"]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    decay_rank: bool = False
    gate_rank: bool = False
    decay_floor: float | None = None
    beta_scale: float = 1.0
    out_norm: Norm


class Mamba2(_Data, frozen=True, kw_only=True, tag_field="op", tag="mamba2"):
    """The Mamba-2 mixer."""

    heads: int
    head_dim: int
    state: int
    groups: int
    dt_limit: tuple[float, float] | None = None
    in_scale: float = 1.0
    in_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """of z, x, B, C, dt"""
    out_norm: Norm | None = None


class Mamba1(_Data, frozen=True, kw_only=True, tag_field="op", tag="mamba1"):
    """The Mamba mixer."""

    state: int
    dt_rank: int
    inner_norm: Norm | None = None


class ShortConv(_Data, frozen=True, kw_only=True, tag_field="op", tag="short_conv"):
    """C * conv(B * x)."""

    kernel: int


class Feedforward(_Data, frozen=True, kw_only=True):
    """The fields that dense and expert feed-forwards share."""

    gated: bool = True
    act: str = "silu"
    intermediate: int = 0
    """channels of gate and up; 0: taken from the tensors"""
    bias: bool = False
    """gate, up and down must have biases; one that merely exists is used all the same"""
    limit: float | None = None
    alpha: float = 1.702
    beta: float | None = None
    linear_beta: float | None = None
    gate_scale: float = 1.0
    out_scale: float = 1.0
    inner_norm: Norm | None = None
    sparsity: float = 0.0
    learned_scale: bool = False


class Mlp(Feedforward, frozen=True, kw_only=True, tag_field="op", tag="mlp"):
    """A dense feed-forward: down(act(gate x) * up x), or down(act(up x)); weights gate, up, down."""


class Groups(_Data, frozen=True, kw_only=True):
    """Experts in groups of which only some may be chosen."""

    n: int = 1
    topk: int = 1
    score: Literal["max", "top2"] = "max"
    fill: float = float("-inf")


class Router(_Data, frozen=True, kw_only=True):
    """How tokens choose experts and weigh them."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "none"] = "softmax"
    score_after_topk: bool = False
    correction: bool = False
    groups: Groups | None = None
    normalize: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    input: Literal["normed", "residual"] = "normed"
    input_norm: Norm | None = None
    per_expert_scale: bool = False
    hash: bool = False
    always: int = 0
    sparsemixer: float = 0.0


class Shared(Feedforward, frozen=True, kw_only=True):
    """An expert that every token visits; fields not given are those of the experts."""

    gate: bool = False
    combine: str = "sum"


class Latent(_Data, frozen=True, kw_only=True):
    """Experts work in a narrower space."""

    norm: Norm | None = None


class Moe(Feedforward, frozen=True, kw_only=True, tag_field="op", tag="moe"):
    """A mixture of experts."""

    experts: int
    top_k: int
    router: Router = Router()
    shared: Shared | None = None
    latent: Latent | None = None
    zero_experts: int = 0
    apply: Literal["output", "input"] = "output"
    pre: Norm | None = None
    post: Norm | None = None


class CompressIndex(_Data, frozen=True, kw_only=True):
    """The choice among compressed rows."""

    heads: int
    dim: int
    topk: int


class Compress(_Data, frozen=True, kw_only=True):
    """One cached row for every ``rate`` tokens."""

    rate: int
    overlap: bool = False
    index: CompressIndex | None = None


class Csa(_Data, frozen=True, kw_only=True, tag_field="op", tag="csa"):
    """A window beside compressed keys."""

    heads: int
    head_dim: int
    o_groups: int
    window: int
    norm: Norm
    rope: RopeTable
    compress: Compress | None = None


class DecayAttention(_Data, frozen=True, kw_only=True, tag_field="op", tag="decay_attention"):
    """Linear attention with a fixed decay per head."""

    heads: int
    head_dim: int
    layers: int
    out_norm: Norm


class Rglru(_Data, frozen=True, kw_only=True, tag_field="op", tag="rglru"):
    """The real-gated linear recurrent unit."""

    heads: int


class Rwkv4(_Data, frozen=True, kw_only=True, tag_field="op", tag="rwkv4"):
    """The two halves of an RWKV-4 layer."""

    part: Literal["time", "channel"]


Op = Attention | Mla | Delta | Mamba2 | Mamba1 | ShortConv | Mlp | Moe | Csa | DecayAttention | Rglru | Rwkv4
"""Every kind of sublayer, told apart by the key ``op``."""


class Branch(_Data, frozen=True, kw_only=True):
    """One of several ops that read the same input and whose outputs add up; weights at ``layers.{i}.{name}``."""

    name: str
    op: Op
    pre: Norm | None = None
    post: Norm | None = None
    in_scale: float = 1.0
    scale: float = 1.0


class Sub(_Data, frozen=True, kw_only=True):
    """A sublayer: x = skip_scale * x + out_scale * post(op(pre(x))), weights at ``layers.{i}.{name}``."""

    name: str
    op: Op | None = None
    branches: tuple[Branch, ...] = ()
    """instead of ``op``"""
    pre: Norm | None = None
    post: Norm | None = None
    skip_scale: float = 1.0
    out_scale: float = 1.0
    residual_from: Literal["input", "normed"] = "input"
    post_residual: Norm | None = None
    post_conv: bool = False
    tap: str | None = None
    source: str | None = msgspec.field(default=None, name="from")
    hold: str | None = None
    add: str | None = None
    snapshot: bool = False
    input: Literal["hidden", "concat_embed"] = "hidden"


class Layer(_Data, frozen=True, kw_only=True):
    """The sublayers of one layer, in order; equal layers compare equal but for ``index``."""

    index: int
    kind: str | None = None
    """the name that config.json or the description gives to this kind of layer"""
    subs: tuple[Sub, ...]


class PerLayerInput(_Data, frozen=True, kw_only=True):
    """A second embedding that every layer reads its own slice of."""

    dim: int
    act: str
    norm: Norm


class MtpCombine(_Data, frozen=True, kw_only=True):
    """How a draft layer joins the hidden state and the next token's embedding."""

    norms: tuple[Norm, ...]
    project: str


class MtpHead(_Data, frozen=True, kw_only=True):
    """The head of a draft layer."""

    norm: Norm | None = None
    share: tuple[str, ...] = ()


class Mtp(_Data, frozen=True, kw_only=True):
    """Draft layers that predict further tokens."""

    count: int = 0
    combine: MtpCombine | None = None
    layer: tuple[Sub, ...] = ()
    head: MtpHead | None = None


class Quant(_Data, frozen=True, kw_only=True):
    """How the checkpoint packs its weights."""

    format: str
    skip: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


class Split(_Data, frozen=True, kw_only=True):
    """View ``dim`` as [groups, sum(sizes)] and split inside each group; sizes may be relative; a null target drops."""

    dim: int = 0
    groups: int = 1
    sizes: tuple[int, ...]
    to: tuple[str | None, ...]


class Rule(_Data, frozen=True, kw_only=True):
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
    scale: float | None = None
    layers: tuple[int, ...] | None = None
    """only where the first group is one of these"""
    quant: str | None = None


class ModelSpec(_Data, frozen=True, kw_only=True):
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
