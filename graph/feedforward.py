"""The ops that work on every token apart: dense feed-forwards and mixtures of experts."""

from __future__ import annotations

from typing import Literal

from treadle.graph.primitives import Activation, Count, Data, Magnitude, Norm, Real, Size


class Feedforward(Data, frozen=True, kw_only=True):
    """The fields that dense and expert feed-forwards share."""

    gated: bool = True
    act: Literal[Activation, "xielu", "swiglu_oai", "situ"] = "silu"
    """xielu has learned parameters, in dense feed-forwards without a gate; swiglu_oai (alpha, limit) and situ (beta,
    linear_beta) are functions of gate and up"""
    intermediate: Count = 0
    """channels of gate and up; 0: taken from the tensors"""
    bias: bool = False
    """gate, up and down must have biases; one that merely exists is used all the same"""
    limit: Real | None = None
    alpha: Real = 1.702
    beta: Real | None = None
    linear_beta: Real | None = None
    gate_scale: Real = 1.0
    out_scale: Real = 1.0
    inner_norm: Norm | None = None
    sparsity: Magnitude = 0.0
    learned_scale: bool = False
    """dense only: the result is multiplied by a learned number ``global_scale``"""


class Mlp(Feedforward, frozen=True, kw_only=True, tag_field="op", tag="mlp"):
    """A dense feed-forward: down(act(gate x) * up x), or down(act(up x)); weights gate, up, down."""


class Groups(Data, frozen=True, kw_only=True):
    """Experts in groups of which only some may be chosen."""

    n: Size = 1
    topk: Size = 1
    score: Literal["max", "top2"] = "max"
    fill: float = float("-inf")


class Router(Data, frozen=True, kw_only=True):
    """How tokens choose experts and weigh them."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "none"] = "softmax"
    score_after_topk: bool = False
    """scores are made of the chosen logits only"""
    correction: bool | Literal["optional"] = False
    """a stored bias counts in the choice, not in the weights; optional: it is 0 where none is stored"""
    dtype: Literal["model", "float32"] = "model"
    """in which the router's product is made"""
    bias: bool = False
    """the router must have a bias"""
    groups: Groups | None = None
    normalize: bool = False
    """weights are divided by max(their sum, norm_min), or by their sum plus norm_eps"""
    norm_eps: Magnitude = 0.0
    norm_min: Magnitude = 0.0
    scale: Real = 1.0
    softcap: Magnitude = 0.0
    input: Literal["normed", "residual"] = "normed"
    input_norm: Norm | None = None
    """of the router alone, with weight ``in_scale`` and a factor of 1 / sqrt(channels)"""
    per_expert_scale: bool = False
    hash: bool = False
    """experts by a table of token ids, weight ``hash`` [vocab, top_k]"""
    always: Count = 0
    """experts behind the chosen ones that every token visits; weights always_gate, always_up, always_down"""
    learned_scale: bool = False
    """weights are multiplied by a learned number ``router_scale``"""
    sparsemixer: Magnitude = 0.0
    """the jitter of the sparse mixer, instead of score"""


class Shared(Feedforward, frozen=True, kw_only=True):
    """An expert that every token visits; fields not given are those of the experts."""

    gate: bool = False
    """times the sigmoid of a product of its own"""
    combine: Literal["sum", "average"] = "sum"


class Latent(Data, frozen=True, kw_only=True):
    """Experts work in a narrower space."""

    norm: Norm | None = None


class Moe(Feedforward, frozen=True, kw_only=True, tag_field="op", tag="moe"):
    """A mixture of experts; weights router, and stacks gate, up, down of one matrix an expert."""

    experts: Size
    top_k: Size
    router: Router = Router()
    shared: Shared | None = None
    latent: Latent | None = None
    zero_experts: Count = 0
    """ids behind the experts that return their input"""
    apply: Literal["output", "input"] = "output"
    """what of an expert is multiplied by its weight"""
    pre: Norm | None = None
    """of the residual stream, for the experts alone; weight expert_pre"""
    post: Norm | None = None
    """weight expert_post"""

    def __post_init__(self) -> None:
        """Refuse a choice among fewer experts than are chosen."""
        groups = self.router.groups or Groups()
        routed = self.experts + self.zero_experts
        if self.top_k > routed // groups.n * groups.topk:
            raise ValueError(f"{self.top_k} of {routed // groups.n * groups.topk} experts cannot be chosen")
        if routed % groups.n:
            raise ValueError(f"{routed} experts are no {groups.n} equal groups")
        if self.act in ("swiglu_oai", "situ") and not self.gated:
            raise ValueError(f"{self.act} needs a gate")
