"""Which canonical weights a decoder has, and their shapes, from its description alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treadle.graph.spec import (
    Attention,
    Delta,
    Feedforward,
    Mamba1,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
    Op,
    ShortConv,
    SpecError,
    Sub,
)


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
    wanted = _embed(spec)
    wanted |= _norm("embed.norm", spec.embed.norm, spec.hidden)
    for layer in spec.layers:
        for sub in layer.subs:
            wanted.update(_sub(f"layers.{layer.index}.{sub.name}", sub, spec.hidden))
    wanted |= _norm("final_norm", spec.final_norm, spec.hidden)
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


def _sub(path: str, sub: Sub, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in ("pre", "post", "post_residual"):
        yield from _norm(f"{path}.{name}", getattr(sub, name), hidden).items()
    if sub.op is not None:
        yield from _op(path, sub.op, hidden)
    for branch in sub.branches:
        beside = f"{path.rpartition('.')[0]}.{branch.name}"
        for name in ("pre", "post"):
            yield from _norm(f"{beside}.{name}", getattr(branch, name), hidden).items()
        yield from _op(beside, branch.op, hidden)


def _op(path: str, op: Op, hidden: int) -> Iterator[tuple[str, Expected]]:
    match op:
        case Attention():
            yield from _attention(path, op, hidden)
        case Mlp():
            yield from _mlp(path, op, hidden)
        case Moe():
            yield from _moe(path, op, hidden)
        case Delta():
            yield from _delta(path, op, hidden)
        case Mamba2():
            yield from _mamba2(path, op, hidden)
        case Mamba1():
            yield from _mamba1(path, op, hidden)
        case ShortConv():
            yield from _short_conv(path, op, hidden)
        case other:
            raise SpecError(f"{path}: op {type(other).__name__.lower()} has no kernels yet")


def _mlp(path: str, op: Feedforward, hidden: int) -> Iterator[tuple[str, Expected]]:
    inner = op.intermediate or -1
    for name in ("gate", "up") if op.gated else ("up",):
        yield from _linear(f"{path}.{name}", inner, hidden, op.bias)
    if op.act == "xielu":
        for name in XIELU:
            yield f"{path}.{name}", Expected(XIELU[name], "bias")
    yield from _norm(f"{path}.inner_norm", op.inner_norm, inner).items()
    yield from _linear(f"{path}.down", hidden, inner, op.bias)


XIELU: Mapping[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The learned parameters of xIELU, as files hold them."""


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


def _attention(path: str, op: Attention, hidden: int) -> Iterator[tuple[str, Expected]]:
    widths = {"q": op.heads * op.head_dim, "k": op.kv_heads * op.head_dim, "v": op.kv_heads * op.v_head_dim}
    for name in "qk" if op.v_from_k else "qkv":
        yield from _linear(f"{path}.{name}", widths[name], hidden, op.bias)
    if op.qk_norm is not None:
        heads = {"q": op.heads, "k": op.kv_heads}
        for name in ("q", "k"):
            shapes = {"full": (widths[name],), "head": (op.head_dim,), "each_head": (heads[name], op.head_dim)}
            yield from _norm(f"{path}.{name}_norm", op.qk_norm, *shapes[op.qk_norm.scope]).items()
    yield from _norm(f"{path}.v_norm", op.v_norm, op.v_head_dim).items()
    yield from _norm(f"{path}.out_norm", op.out_norm, op.heads * op.v_head_dim).items()
    if op.sinks:
        yield f"{path}.sinks", Expected((op.heads,), "bias")
    for name in ("lq1", "lk1", "lq2", "lk2") if op.diff is not None else ():
        yield f"{path}.{name}", Expected((op.head_dim,), "bias")
    if op.gate is not None:
        width = op.heads if op.gate.per == "head" else op.heads * op.v_head_dim
        yield from _linear(f"{path}.gate", width, hidden, False)
    yield from _linear(f"{path}.o", hidden, op.heads * op.v_head_dim, op.o_bias)


def _delta(path: str, op: Delta, hidden: int) -> Iterator[tuple[str, Expected]]:
    values = op.v_heads * op.v_dim
    decays = op.v_heads * (op.k_dim if op.decay == "channel" else 1)
    for name, channels in zip("qkv", op.channels):
        yield from _linear(f"{path}.{name}", channels, hidden, False)
        yield f"{path}.{name}_conv.weight", Expected((channels, op.conv))
    for name, rows, narrow in (("decay", decays, op.decay_rank), ("z", values, op.gate_rank)):
        if narrow:
            yield from _linear(f"{path}.{name}_a", -1, hidden, False)
            yield from _linear(f"{path}.{name}_b", rows, -1, False)
        else:
            yield from _linear(f"{path}.{name}", rows, hidden, False)
    yield from _linear(f"{path}.beta", op.v_heads, hidden, False)
    yield f"{path}.A_log", Expected((op.v_heads,), "bias")
    yield f"{path}.dt_bias", Expected((decays,), "bias")
    yield from _norm(f"{path}.out_norm", op.out_norm, op.v_dim).items()
    yield from _linear(f"{path}.o", hidden, values, False)


def _mamba2(path: str, op: Mamba2, hidden: int) -> Iterator[tuple[str, Expected]]:
    mixed = sum(op.channels)
    for name, rows in (("z", op.inner), ("xbc", mixed), ("dt", op.heads)):
        yield from _linear(f"{path}.{name}", rows, hidden, op.bias)
    yield f"{path}.conv.weight", Expected((mixed, op.conv))
    yield f"{path}.conv.bias", Expected((mixed,), "bias", op.conv_bias)
    for name, kind in (("A_log", "bias"), ("dt_bias", "bias"), ("D", "norm")):
        yield f"{path}.{name}", Expected((op.heads,), kind)
    yield from _norm(f"{path}.out_norm", op.out_norm, op.inner).items()
    yield from _linear(f"{path}.o", hidden, op.inner, op.o_bias)


def _mamba1(path: str, op: Mamba1, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in "xz":
        yield from _linear(f"{path}.{name}", op.inner, hidden, op.bias)
    yield f"{path}.conv.weight", Expected((op.inner, op.conv))
    yield f"{path}.conv.bias", Expected((op.inner,), "bias", op.conv_bias)
    for name, norm, rows in (("dt_in", "dt", op.dt_rank), ("B", "B", op.state), ("C", "C", op.state)):
        yield from _linear(f"{path}.{name}", rows, op.inner, False)
        yield from _norm(f"{path}.{norm}_norm", op.inner_norm, rows).items()
    yield from _linear(f"{path}.dt", op.inner, op.dt_rank, True)
    yield f"{path}.A_log", Expected((op.inner, op.state), "bias")
    yield f"{path}.D", Expected((op.inner,), "norm")
    yield from _linear(f"{path}.o", hidden, op.inner, op.bias)


def _short_conv(path: str, op: ShortConv, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in ("B", "C", "x", "o"):
        yield from _linear(f"{path}.{name}", hidden, hidden, op.bias)
    yield f"{path}.conv.weight", Expected((hidden, op.kernel))
    yield f"{path}.conv.bias", Expected((hidden,), "bias", op.bias)


def _linear(path: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Expected]]:
    yield f"{path}.weight", Expected((rows, columns))
    yield f"{path}.bias", Expected((rows,), "bias", bias)


def _norm(path: str, norm: Norm | None, *shape: int) -> Mapping[str, Expected]:
    if norm is None or norm.kind == "l2":
        return {}
    kind = "norm_minus_one" if norm.plus_one else "norm"
    return {
        f"{path}.weight": Expected(shape, kind, norm.weight),
        f"{path}.bias": Expected(shape, "bias", norm.bias),
    }
