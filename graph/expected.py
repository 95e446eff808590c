"""Which canonical weights a decoder has, and their shapes, from its description alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treadle.graph.spec import Attention, Feedforward, Mlp, ModelSpec, Moe, Norm, SpecError, Sub


@dataclass(frozen=True)
class Expected:
    """A weight that the description asks for. -1 in ``shape``: any size.

    ``kind`` says how random ones are made: ``matrix`` with a deviation of 1 / sqrt(columns), ``embedding``, ``norm``
    near 1 (near 0 where 1 is added to it), ``bias`` small.
    """

    shape: tuple[int, ...]
    kind: str = "matrix"
    required: bool = True
    """False for biases that are used where they exist"""


def expected(spec: ModelSpec) -> dict[str, Expected]:
    """Return every weight that ``spec`` reads, in layer order.

    Raises: SpecError for an op whose weights are not known.
    """
    wanted: dict[str, Expected] = {"embed.weight": Expected((spec.vocab, spec.hidden), "embedding")}
    wanted |= _norm("embed.norm", spec.embed.norm, spec.hidden)
    for layer in spec.layers:
        for sub in layer.subs:
            wanted.update(_sub(f"layers.{layer.index}.{sub.name}", sub, spec.hidden))
    wanted |= _norm("final_norm", spec.final_norm, spec.hidden)
    if not spec.head.tied:
        wanted["head.weight"] = Expected((spec.vocab, spec.hidden))
    wanted["head.bias"] = Expected((spec.vocab,), "bias", spec.head.bias)
    return wanted


def _sub(path: str, sub: Sub, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in ("pre", "post", "post_residual"):
        yield from _norm(f"{path}.{name}", getattr(sub, name), hidden).items()
    match sub.op:
        case Attention() as op:
            yield from _attention(path, op, hidden)
        case Mlp() as op:
            yield from _mlp(path, op, hidden)
        case Moe() as op:
            yield from _moe(path, op, hidden)
        case other:
            raise SpecError(
                f"{path}: op {type(other).__name__.lower()} has no kernels yet; there are attention, mlp and moe"
            )


def _attention(path: str, op: Attention, hidden: int) -> Iterator[tuple[str, Expected]]:
    widths = {"q": op.heads * op.head_dim, "k": op.kv_heads * op.head_dim, "v": op.kv_heads * op.v_head_dim}
    for name, width in widths.items():
        yield from _linear(f"{path}.{name}", width, hidden, op.bias)
    if op.qk_norm is not None:
        for name in ("q", "k"):
            width = widths[name] if op.qk_norm.scope == "full" else op.head_dim
            yield from _norm(f"{path}.{name}_norm", op.qk_norm, width).items()
    if op.sinks:
        yield f"{path}.sinks", Expected((op.heads,), "bias")
    yield from _linear(f"{path}.o", hidden, op.heads * op.v_head_dim, op.o_bias)


def _mlp(path: str, op: Feedforward, hidden: int) -> Iterator[tuple[str, Expected]]:
    inner = op.intermediate or -1
    for name in ("gate", "up") if op.gated else ("up",):
        yield from _linear(f"{path}.{name}", inner, hidden, op.bias)
    yield from _norm(f"{path}.inner_norm", op.inner_norm, inner).items()
    yield from _linear(f"{path}.down", hidden, inner, op.bias)


def _moe(path: str, op: Moe, hidden: int) -> Iterator[tuple[str, Expected]]:
    router, routed = op.router, op.experts + op.zero_experts
    if router.input_norm is not None:
        yield f"{path}.in_scale", Expected((hidden,), "norm")
    yield from _linear(f"{path}.router", routed + router.always, hidden, router.bias)
    if router.correction:
        yield f"{path}.correction", Expected((routed,), "bias")
    if router.per_expert_scale:
        yield f"{path}.expert_scale", Expected((routed + router.always,), "norm")
    yield from _norm(f"{path}.expert_pre", op.pre, hidden).items()
    width = hidden
    if op.latent is not None:
        width = -1
        yield from _linear(f"{path}.latent_in", width, hidden, False)
        yield from _norm(f"{path}.latent_norm", op.latent.norm, width).items()
        yield from _linear(f"{path}.latent_out", hidden, width, False)
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
            yield from _linear(f"{path}.shared_gate", 1, hidden, False)
    yield from _norm(f"{path}.expert_post", op.post, hidden).items()


def _linear(path: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Expected]]:
    yield f"{path}.weight", Expected((rows, columns))
    yield f"{path}.bias", Expected((rows,), "bias", bias)


def _norm(path: str, norm: Norm | None, width: int) -> Mapping[str, Expected]:
    if norm is None or norm.kind == "l2":
        return {}
    kind = "norm_minus_one" if norm.plus_one else "norm"
    return {
        f"{path}.weight": Expected((width,), kind, norm.weight),
        f"{path}.bias": Expected((width,), "bias", norm.bias),
    }
