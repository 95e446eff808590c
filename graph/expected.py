"""Which canonical weights a decoder has, and their shapes, from its description alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle.graph.expected_mixers import MIXERS
from treadle.graph.expected_weight import Expected, linear, norm
from treadle.graph.spec import Feedforward, Mlp, ModelSpec, Moe, Op, PerLayerInput, SpecError, Sub


def expected(spec: ModelSpec) -> dict[str, Expected]:
    """Return every weight that ``spec`` reads, in layer order.

    Raises: SpecError for an op whose weights are not known.
    """
    wanted = _embed(spec)
    wanted |= norm("embed.norm", spec.embed.norm, spec.hidden)
    wanted |= _per_layer(spec)
    banked = False
    for layer in spec.layers:
        for sub in layer.subs:
            wanted.update(_sub(f"layers.{layer.index}.{sub.name}", sub, spec.hidden))
            wanted.update(_mixing(f"layers.{layer.index}.{sub.name}", spec, banked))
            banked = banked or sub.snapshot
        if spec.layer_scalar:
            wanted[f"layers.{layer.index}.scalar"] = Expected((1,), "norm")
        if spec.per_layer_input is not None:
            wanted.update(_layer_input(f"layers.{layer.index}.ple", spec.per_layer_input, spec.hidden))
    wanted.update(_mixing("head_mix", spec, banked, head=True))
    wanted |= norm("final_norm", spec.final_norm, spec.hidden)
    if not spec.head.tied:
        wanted["head.weight"] = Expected((spec.vocab, spec.embed.width or spec.hidden))
    wanted["head.bias"] = Expected((spec.vocab,), "bias", spec.head.bias)
    return wanted


def _embed(spec: ModelSpec) -> dict[str, Expected]:
    embed = spec.embed
    wanted = {"embed.weight": Expected((spec.vocab, embed.width or spec.hidden), "embedding")}
    if embed.width:
        wanted["embed.project.weight"] = Expected((spec.hidden, embed.width))
        wanted["head.project.weight"] = Expected((embed.width, spec.hidden))
    if embed.positions is not None and embed.positions.kind == "learned":
        rows = spec.max_positions + embed.positions.offset
        wanted["embed.positions"] = Expected((rows, spec.hidden), "embedding")
    return wanted


def _mixing(path: str, spec: ModelSpec, banked: bool, head: bool = False) -> Iterator[tuple[str, Expected]]:
    """Yield the weights that a sublayer, or the head, mixes residual streams by."""
    residual, hidden = spec.residual, spec.hidden
    if residual.kind == "attn_res" and banked:
        yield f"{path}.res.norm.weight", Expected((hidden,), "norm")
        yield f"{path}.res.proj.weight", Expected((1, hidden))
    if residual.kind in ("mhc", "hc_diag"):
        count = residual.streams
        rows = count if head else 2 * count if residual.kind == "hc_diag" else (2 + count) * count
        scales = 1 if head else 2 if residual.kind == "hc_diag" else 3
        yield f"{path}.hc.fn", Expected((rows, count * hidden))
        yield f"{path}.hc.base", Expected((rows,), "bias")
        yield f"{path}.hc.scale", Expected((scales,), "norm")


def _per_layer(spec: ModelSpec) -> Mapping[str, Expected]:
    """Return the weights of the second embedding, before any layer."""
    given = spec.per_layer_input
    if given is None:
        return {}
    width = len(spec.layers) * given.dim
    return {
        "ple.embed": Expected((spec.vocab, width), "embedding"),
        "ple.proj.weight": Expected((width, spec.hidden)),
        **norm("ple.norm", given.norm, given.dim),
    }


def _layer_input(path: str, given: PerLayerInput, hidden: int) -> Iterator[tuple[str, Expected]]:
    yield f"{path}.gate.weight", Expected((given.dim, hidden))
    yield f"{path}.proj.weight", Expected((hidden, given.dim))
    yield from norm(f"{path}.post", given.norm, hidden).items()


def _sub(path: str, sub: Sub, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in ("pre", "post", "post_residual"):
        yield from norm(f"{path}.{name}", getattr(sub, name), hidden).items()
    if sub.post_conv:
        yield f"{path}.post_conv.weight", Expected((hidden, sub.post_conv))
    if sub.op is not None:
        yield from _op(path, sub.op, hidden)
    for branch in sub.branches:
        beside = f"{path.rpartition('.')[0]}.{branch.name}"
        for name in ("pre", "post"):
            yield from norm(f"{beside}.{name}", getattr(branch, name), hidden).items()
        yield from _op(beside, branch.op, hidden)


def _op(path: str, op: Op, hidden: int) -> Iterator[tuple[str, Expected]]:
    match op:
        case Mlp():
            yield from _mlp(path, op, hidden)
        case Moe():
            yield from _moe(path, op, hidden)
        case _ if type(op) in MIXERS:
            yield from MIXERS[type(op)](path, op, hidden)
        case other:
            raise SpecError(f"{path}: op {type(other).__name__.lower()} has no kernels yet")


def _mlp(path: str, op: Feedforward, hidden: int) -> Iterator[tuple[str, Expected]]:
    inner = op.intermediate or -1
    for name in ("gate", "up") if op.gated else ("up",):
        yield from linear(f"{path}.{name}", inner, hidden, op.bias)
    if op.act == "xielu":
        for name in XIELU:
            yield f"{path}.{name}", Expected(XIELU[name], "bias")
    yield from norm(f"{path}.inner_norm", op.inner_norm, inner).items()
    yield from linear(f"{path}.down", hidden, inner, op.bias)
    if op.learned_scale:
        yield f"{path}.global_scale", Expected((1,), "norm")


XIELU: Mapping[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The learned parameters of xIELU, as files hold them."""


def _moe(path: str, op: Moe, hidden: int) -> Iterator[tuple[str, Expected]]:
    router, routed = op.router, op.experts + op.zero_experts
    if router.input_norm is not None:
        yield f"{path}.in_scale", Expected((hidden,), "norm")
    yield from linear(f"{path}.router", routed + router.always, hidden, router.bias)
    if router.correction:
        yield f"{path}.correction", Expected((routed,), "bias", router.correction is True)
    if router.hash:
        yield f"{path}.hash", Expected((-1, op.top_k), "ids")
    if router.learned_scale:
        yield f"{path}.router_scale", Expected((1,), "norm")
    if router.per_expert_scale:
        yield f"{path}.expert_scale", Expected((routed + router.always,), "norm")
    yield from norm(f"{path}.expert_pre", op.pre, hidden).items()
    width = hidden
    if op.latent is not None:
        width = -1
        yield from linear(f"{path}.latent_in", width, hidden, False)
        yield from norm(f"{path}.latent_norm", op.latent.norm, width).items()
        yield from linear(f"{path}.latent_out", hidden, width, False)
    for prefix, count in (("", op.experts), ("always_", router.always)):
        if count:
            inner = op.intermediate or -1
            for name in ("gate", "up") if op.gated else ("up",):
                yield f"{path}.{prefix}{name}", Expected((count, inner, width))
                yield f"{path}.{prefix}{name}_bias", Expected((count, inner), "bias", op.bias)
            yield f"{path}.{prefix}down", Expected((count, width, inner))
            yield f"{path}.{prefix}down_bias", Expected((count, width), "bias", op.bias)
    if op.shared is not None:
        yield from _mlp(f"{path}.shared", op.shared, hidden)
        if op.shared.gate:
            yield from linear(f"{path}.shared_gate", 1, hidden, False)
    yield from norm(f"{path}.expert_post", op.post, hidden).items()
