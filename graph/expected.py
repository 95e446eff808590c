"""Which canonical weights a decoder has, and their shapes, from its description alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treadle.graph.spec import (
    Attention,
    Compress,
    Csa,
    DecayAttention,
    Delta,
    Feedforward,
    Index,
    Mamba1,
    Mamba2,
    Mla,
    Mlp,
    ModelSpec,
    Moe,
    Norm,
    Op,
    PerLayerInput,
    Rglru,
    Rwkv4,
    ShortConv,
    SpecError,
    Sub,
)


@dataclass(frozen=True)
class Expected:
    """A weight that the description asks for. -1 in ``shape``: any size.

    ``kind`` says how random ones are made: ``matrix`` with a deviation of 1 / sqrt(columns), ``embedding``, ``norm``
    near 1 (near 0 where 1 is added to it), ``bias`` small, ``ids`` whole numbers from 0 on.
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
        **_norm("ple.norm", given.norm, given.dim),
    }


def _layer_input(path: str, given: PerLayerInput, hidden: int) -> Iterator[tuple[str, Expected]]:
    yield f"{path}.gate.weight", Expected((given.dim, hidden))
    yield f"{path}.proj.weight", Expected((hidden, given.dim))
    yield from _norm(f"{path}.post", given.norm, hidden).items()


def _sub(path: str, sub: Sub, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in ("pre", "post", "post_residual"):
        yield from _norm(f"{path}.{name}", getattr(sub, name), hidden).items()
    if sub.post_conv:
        yield f"{path}.post_conv.weight", Expected((hidden, sub.post_conv))
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
        case Mla():
            yield from _mla(path, op, hidden)
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
        case Csa():
            yield from _csa(path, op, hidden)
        case DecayAttention():
            yield from _decay_attention(path, op, hidden)
        case Rglru():
            yield from _rglru(path, op, hidden)
        case Rwkv4():
            yield from _rwkv4(path, op, hidden)
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
    if op.learned_scale:
        yield f"{path}.global_scale", Expected((1,), "norm")


XIELU: Mapping[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The learned parameters of xIELU, as files hold them."""


def _moe(path: str, op: Moe, hidden: int) -> Iterator[tuple[str, Expected]]:
    router, routed = op.router, op.experts + op.zero_experts
    if router.input_norm is not None:
        yield f"{path}.in_scale", Expected((hidden,), "norm")
    yield from _linear(f"{path}.router", routed + router.always, hidden, router.bias)
    if router.correction:
        yield f"{path}.correction", Expected((routed,), "bias", router.correction is True)
    if router.hash:
        yield f"{path}.hash", Expected((-1, op.top_k), "ids")
    if router.learned_scale:
        yield f"{path}.router_scale", Expected((1,), "norm")
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
    own = "q" if op.kv_from is not None else "qk"
    for name in own if op.v_from_k or op.kv_from is not None else "qkv":
        yield from _linear(f"{path}.{name}", widths[name], hidden, op.bias)
    if op.qk_norm is not None:
        heads = {"q": op.heads, "k": op.kv_heads}
        for name in own:
            shapes = {"full": (widths[name],), "head": (op.head_dim,), "each_head": (heads[name], op.head_dim)}
            yield from _norm(f"{path}.{name}_norm", op.qk_norm, *shapes[op.qk_norm.scope]).items()
    if op.kv_from is None:
        yield from _norm(f"{path}.v_norm", op.v_norm, op.v_head_dim).items()
    for name in "kv" if op.kv_conv else "":
        yield f"{path}.{name}_conv.weight", Expected((widths[name], op.kv_conv))
    if op.index is not None:
        yield from _index(f"{path}.index", op.index, hidden, hidden)
    if op.rel is not None:
        yield from _linear(f"{path}.r", op.heads * op.rel.dim, hidden, False)
        yield f"{path}.rel.weight", Expected((op.rel.extent, op.rel.dim))
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


def _csa(path: str, op: Csa, hidden: int) -> Iterator[tuple[str, Expected]]:
    width = op.heads * op.head_dim
    yield from _linear(f"{path}.q_a", op.q_lora, hidden, False)
    yield from _norm(f"{path}.q_a_norm", op.norm, op.q_lora).items()
    yield from _linear(f"{path}.q_b", width, op.q_lora, False)
    yield from _linear(f"{path}.kv", op.head_dim, hidden, False)
    yield from _norm(f"{path}.kv_norm", op.norm, op.head_dim).items()
    yield f"{path}.sinks", Expected((op.heads,), "bias")
    if op.compress is not None:
        yield from _compress(f"{path}.comp", op.compress, op.head_dim, hidden)
        index = op.compress.index
        if index is not None:
            yield from _compress(f"{path}.comp.index", op.compress, index.dim, hidden)
            yield from _linear(f"{path}.comp.index.q", index.heads * index.dim, op.q_lora, False)
            yield f"{path}.comp.index.w.weight", Expected((index.heads, hidden))
    yield f"{path}.o_a.weight", Expected((op.o_groups, op.o_lora, width // op.o_groups))
    yield from _linear(f"{path}.o_b", hidden, op.o_groups * op.o_lora, False)


def _compress(path: str, op: Compress, dim: int, hidden: int) -> Iterator[tuple[str, Expected]]:
    width = dim * (2 if op.overlap else 1)
    for name in ("kv", "gate"):
        yield from _linear(f"{path}.{name}", width, hidden, False)
    yield f"{path}.ape", Expected((op.rate, width))
    yield f"{path}.norm.weight", Expected((dim,), "norm")


def _decay_attention(path: str, op: DecayAttention, hidden: int) -> Iterator[tuple[str, Expected]]:
    width = op.heads * op.head_dim
    for name in ("q", "k", "v", "gate"):
        yield from _linear(f"{path}.{name}", width, hidden, False)
    yield from _norm(f"{path}.out_norm", op.out_norm, width).items()
    yield from _linear(f"{path}.o", hidden, width, False)


def _rglru(path: str, op: Rglru, hidden: int) -> Iterator[tuple[str, Expected]]:
    width, inner = op.width, op.width // op.heads
    for name in "xy":
        yield from _linear(f"{path}.{name}", width, hidden, True)
    yield f"{path}.conv.weight", Expected((width, op.conv))
    yield f"{path}.conv.bias", Expected((width,), "bias")
    for name in ("in_gate", "a_gate"):
        yield f"{path}.{name}.weight", Expected((op.heads, inner, inner))
        yield f"{path}.{name}.bias", Expected((width,), "bias")
    yield f"{path}.param", Expected((width,), "bias")
    yield from _linear(f"{path}.o", hidden, width, True)


def _rwkv4(path: str, op: Rwkv4, hidden: int) -> Iterator[tuple[str, Expected]]:
    time = op.part == "time"
    rows = {"r": op.width if time else hidden, "k": op.width, "v": op.width if time else hidden}
    for name, count in rows.items():
        if time or name != "v":
            yield f"{path}.mix_{name}", Expected((hidden,), "norm")
        yield from _linear(f"{path}.{name}", count, op.width if name == "v" and not time else hidden, False)
    if time:
        for name in ("decay", "first"):
            yield f"{path}.{name}", Expected((op.width,), "bias")
        yield from _linear(f"{path}.o", hidden, op.width, False)


def _mla(path: str, op: Mla, hidden: int) -> Iterator[tuple[str, Expected]]:
    width, low = op.heads * (op.nope + op.rope_dim), op.q_lora
    if low is None:
        yield from _linear(f"{path}.q", width, hidden, False)
    else:
        yield from _linear(f"{path}.q_a", low, hidden, op.bias)
        yield from _norm(f"{path}.q_a_norm", op.lora_norm, low).items()
        yield from _linear(f"{path}.q_b", width, op.q_source, False)
    yield from _linear(f"{path}.kv_a", op.kv_lora + op.rope_dim, hidden, op.bias)
    yield from _norm(f"{path}.kv_a_norm", op.lora_norm, op.kv_lora).items()
    yield f"{path}.kv_b.weight", Expected((op.heads * (op.nope + op.v_dim), op.kv_lora))
    if op.sinks:
        yield f"{path}.sinks", Expected((op.heads,), "bias")
    if op.index is not None and not op.index.share:
        yield from _index(f"{path}.index", op.index, hidden, low or hidden)
    if op.gate is not None:
        rows = op.heads if op.gate.per == "head" else op.heads * op.v_dim
        yield from _linear(f"{path}.gate", rows, op.q_source if op.gate.source == "q_lora" else hidden, False)
    yield from _linear(f"{path}.o", hidden, op.heads * op.v_dim, op.bias)


def _index(path: str, index: Index, hidden: int, low: int) -> Iterator[tuple[str, Expected]]:
    source = low if index.q_from == "q_lora" else hidden
    yield from _linear(f"{path}.q", index.heads * index.dim, source, False)
    yield from _norm(f"{path}.q_norm", index.q_norm, index.dim).items()
    yield from _linear(f"{path}.k", index.dim, hidden, False)
    yield from _norm(f"{path}.k_norm", index.k_norm, index.dim).items()
    if index.kind == "dsa":
        yield f"{path}.w.weight", Expected((index.heads, hidden))


def _linear(path: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Expected]]:
    yield f"{path}.weight", Expected((rows, columns))
    yield f"{path}.bias", Expected((rows,), "bias", bias)


def _norm(path: str, norm: Norm | None, *shape: int) -> Mapping[str, Expected]:
    if norm is None or norm.kind == "l2":
        return {}
    kind = "norm_minus_one" if norm.plus_one else "norm"
    gate = {"gate_down": (-1, *shape), "gate_up": (*shape, -1)} if norm.low_rank_gate else {}
    return {
        **{f"{path}.{name}.weight": Expected(sizes) for name, sizes in gate.items()},
        f"{path}.weight": Expected(shape, kind, norm.weight),
        f"{path}.bias": Expected(shape, "bias", norm.bias),
    }
