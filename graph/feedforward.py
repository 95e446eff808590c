"""The ops that work on every token apart: dense feed-forwards and mixtures of experts."""

from __future__ import annotations

from typing import Literal

from treadle.graph.primitives import Activation, Count, Data, Magnitude, Norm, Real, Size


class Feedforward(Data, frozen=True, kw_only=True):
    """The fields that dense and expert feed-forwards share."""

    gated: bool = True
    act: Literal[Activation, "xielu"] = "silu"
    """xielu has learned parameters, in dense feed-forwards without a gate"""
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
    correction: bool = False
    groups: Groups | None = None
    normalize: bool = False
    norm_eps: Magnitude = 0.0
    norm_min: Magnitude = 0.0
    scale: Real = 1.0
    softcap: Magnitude = 0.0
    input: Literal["normed", "residual"] = "normed"
    input_norm: Norm | None = None
    per_expert_scale: bool = False
    hash: bool = False
    always: Count = 0
    sparsemixer: Magnitude = 0.0


class Shared(Feedforward, frozen=True, kw_only=True):
    """An expert that every token visits; fields not given are those of the experts."""

    gate: bool = False
    combine: str = "sum"


class Latent(Data, frozen=True, kw_only=True):
    """Experts work in a narrower space."""

    norm: Norm | None = None


class Moe(Feedforward, frozen=True, kw_only=True, tag_field="op", tag="moe"):
    """A mixture of experts."""

    experts: Size
    top_k: Size
    router: Router = Router()
    shared: Shared | None = None
    latent: Latent | None = None
    zero_experts: Count = 0
    apply: Literal["output", "input"] = "output"
    pre: Norm | None = None
    post: Norm | None = None
