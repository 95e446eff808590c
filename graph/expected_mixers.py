"""Which weights the ops have that mix the tokens of a sequence. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from treadle.graph.expected_weight import Expected, linear, norm
from treadle.graph.spec import (
    Attention,
    Compress,
    Csa,
    DecayAttention,
    Delta,
    Index,
    Mamba1,
    Mamba2,
    Mla,
    Rglru,
    Rwkv4,
    ShortConv,
)


def _attention(path: str, op: Attention, hidden: int) -> Iterator[tuple[str, Expected]]:
    widths = {"q": op.heads * op.head_dim, "k": op.kv_heads * op.head_dim, "v": op.kv_heads * op.v_head_dim}
    own = "q" if op.kv_from is not None else "qk"
    for name in own if op.v_from_k or op.kv_from is not None else "qkv":
        yield from linear(f"{path}.{name}", widths[name], hidden, op.bias)
    if op.qk_norm is not None:
        heads = {"q": op.heads, "k": op.kv_heads}
        for name in own:
            shapes = {"full": (widths[name],), "head": (op.head_dim,), "each_head": (heads[name], op.head_dim)}
            yield from norm(f"{path}.{name}_norm", op.qk_norm, *shapes[op.qk_norm.scope]).items()
    if op.kv_from is None:
        yield from norm(f"{path}.v_norm", op.v_norm, op.v_head_dim).items()
    for name in "kv" if op.kv_conv else "":
        yield f"{path}.{name}_conv.weight", Expected((widths[name], op.kv_conv))
    if op.index is not None:
        yield from _index(f"{path}.index", op.index, hidden, hidden)
    if op.rel is not None:
        yield from linear(f"{path}.r", op.heads * op.rel.dim, hidden, False)
        yield f"{path}.rel.weight", Expected((op.rel.extent, op.rel.dim))
    yield from norm(f"{path}.out_norm", op.out_norm, op.heads * op.v_head_dim).items()
    if op.sinks:
        yield f"{path}.sinks", Expected((op.heads,), "bias")
    for name in ("lq1", "lk1", "lq2", "lk2") if op.diff is not None else ():
        yield f"{path}.{name}", Expected((op.head_dim,), "bias")
    if op.gate is not None:
        width = op.heads if op.gate.per == "head" else op.heads * op.v_head_dim
        yield from linear(f"{path}.gate", width, hidden, False)
    yield from linear(f"{path}.o", hidden, op.heads * op.v_head_dim, op.o_bias)


def _delta(path: str, op: Delta, hidden: int) -> Iterator[tuple[str, Expected]]:
    values = op.v_heads * op.v_dim
    decays = op.v_heads * (op.k_dim if op.decay == "channel" else 1)
    for name, channels in zip("qkv", op.channels):
        yield from linear(f"{path}.{name}", channels, hidden, False)
        yield f"{path}.{name}_conv.weight", Expected((channels, op.conv))
    for name, rows, narrow in (("decay", decays, op.decay_rank), ("z", values, op.gate_rank)):
        if narrow:
            yield from linear(f"{path}.{name}_a", -1, hidden, False)
            yield from linear(f"{path}.{name}_b", rows, -1, False)
        else:
            yield from linear(f"{path}.{name}", rows, hidden, False)
    yield from linear(f"{path}.beta", op.v_heads, hidden, False)
    yield f"{path}.A_log", Expected((op.v_heads,), "bias")
    yield f"{path}.dt_bias", Expected((decays,), "bias")
    yield from norm(f"{path}.out_norm", op.out_norm, op.v_dim).items()
    yield from linear(f"{path}.o", hidden, values, False)


def _mamba2(path: str, op: Mamba2, hidden: int) -> Iterator[tuple[str, Expected]]:
    mixed = sum(op.channels)
    for name, rows in (("z", op.inner), ("xbc", mixed), ("dt", op.heads)):
        yield from linear(f"{path}.{name}", rows, hidden, op.bias)
    yield f"{path}.conv.weight", Expected((mixed, op.conv))
    yield f"{path}.conv.bias", Expected((mixed,), "bias", op.conv_bias)
    for name, kind in (("A_log", "bias"), ("dt_bias", "bias"), ("D", "norm")):
        yield f"{path}.{name}", Expected((op.heads,), kind)
    yield from norm(f"{path}.out_norm", op.out_norm, op.inner).items()
    yield from linear(f"{path}.o", hidden, op.inner, op.o_bias)


def _mamba1(path: str, op: Mamba1, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in "xz":
        yield from linear(f"{path}.{name}", op.inner, hidden, op.bias)
    yield f"{path}.conv.weight", Expected((op.inner, op.conv))
    yield f"{path}.conv.bias", Expected((op.inner,), "bias", op.conv_bias)
    for name, normed, rows in (("dt_in", "dt", op.dt_rank), ("B", "B", op.state), ("C", "C", op.state)):
        yield from linear(f"{path}.{name}", rows, op.inner, False)
        yield from norm(f"{path}.{normed}_norm", op.inner_norm, rows).items()
    yield from linear(f"{path}.dt", op.inner, op.dt_rank, True)
    yield f"{path}.A_log", Expected((op.inner, op.state), "bias")
    yield f"{path}.D", Expected((op.inner,), "norm")
    yield from linear(f"{path}.o", hidden, op.inner, op.bias)


def _short_conv(path: str, op: ShortConv, hidden: int) -> Iterator[tuple[str, Expected]]:
    for name in ("B", "C", "x", "o"):
        yield from linear(f"{path}.{name}", hidden, hidden, op.bias)
    yield f"{path}.conv.weight", Expected((hidden, op.kernel))
    yield f"{path}.conv.bias", Expected((hidden,), "bias", op.bias)


def _csa(path: str, op: Csa, hidden: int) -> Iterator[tuple[str, Expected]]:
    width = op.heads * op.head_dim
    yield from linear(f"{path}.q_a", op.q_lora, hidden, False)
    yield from norm(f"{path}.q_a_norm", op.norm, op.q_lora).items()
    yield from linear(f"{path}.q_b", width, op.q_lora, False)
    yield from linear(f"{path}.kv", op.head_dim, hidden, False)
    yield from norm(f"{path}.kv_norm", op.norm, op.head_dim).items()
    yield f"{path}.sinks", Expected((op.heads,), "bias")
    if op.compress is not None:
        yield from _compress(f"{path}.comp", op.compress, op.head_dim, hidden)
        index = op.compress.index
        if index is not None:
            yield from _compress(f"{path}.comp.index", op.compress, index.dim, hidden)
            yield from linear(f"{path}.comp.index.q", index.heads * index.dim, op.q_lora, False)
            yield f"{path}.comp.index.w.weight", Expected((index.heads, hidden))
    yield f"{path}.o_a.weight", Expected((op.o_groups, op.o_lora, width // op.o_groups))
    yield from linear(f"{path}.o_b", hidden, op.o_groups * op.o_lora, False)


def _compress(path: str, op: Compress, dim: int, hidden: int) -> Iterator[tuple[str, Expected]]:
    width = dim * (2 if op.overlap else 1)
    for name in ("kv", "gate"):
        yield from linear(f"{path}.{name}", width, hidden, False)
    yield f"{path}.ape", Expected((op.rate, width))
    yield f"{path}.norm.weight", Expected((dim,), "norm")


def _decay_attention(path: str, op: DecayAttention, hidden: int) -> Iterator[tuple[str, Expected]]:
    width = op.heads * op.head_dim
    for name in ("q", "k", "v", "gate"):
        yield from linear(f"{path}.{name}", width, hidden, False)
    yield from norm(f"{path}.out_norm", op.out_norm, width).items()
    yield from linear(f"{path}.o", hidden, width, False)


def _rglru(path: str, op: Rglru, hidden: int) -> Iterator[tuple[str, Expected]]:
    width, inner = op.width, op.width // op.heads
    for name in "xy":
        yield from linear(f"{path}.{name}", width, hidden, True)
    yield f"{path}.conv.weight", Expected((width, op.conv))
    yield f"{path}.conv.bias", Expected((width,), "bias")
    for name in ("in_gate", "a_gate"):
        yield f"{path}.{name}.weight", Expected((op.heads, inner, inner))
        yield f"{path}.{name}.bias", Expected((width,), "bias")
    yield f"{path}.param", Expected((width,), "bias")
    yield from linear(f"{path}.o", hidden, width, True)


def _rwkv4(path: str, op: Rwkv4, hidden: int) -> Iterator[tuple[str, Expected]]:
    time = op.part == "time"
    rows = {"r": op.width if time else hidden, "k": op.width, "v": op.width if time else hidden}
    for name, count in rows.items():
        if time or name != "v":
            yield f"{path}.mix_{name}", Expected((hidden,), "norm")
        yield from linear(f"{path}.{name}", count, op.width if name == "v" and not time else hidden, False)
    if time:
        for name in ("decay", "first"):
            yield f"{path}.{name}", Expected((op.width,), "bias")
        yield from linear(f"{path}.o", hidden, op.width, False)


def _mla(path: str, op: Mla, hidden: int) -> Iterator[tuple[str, Expected]]:
    width, low = op.heads * (op.nope + op.rope_dim), op.q_lora
    if low is None:
        yield from linear(f"{path}.q", width, hidden, False)
    else:
        yield from linear(f"{path}.q_a", low, hidden, op.bias)
        yield from norm(f"{path}.q_a_norm", op.lora_norm, low).items()
        yield from linear(f"{path}.q_b", width, op.q_source, False)
    yield from linear(f"{path}.kv_a", op.kv_lora + op.rope_dim, hidden, op.bias)
    yield from norm(f"{path}.kv_a_norm", op.lora_norm, op.kv_lora).items()
    yield f"{path}.kv_b.weight", Expected((op.heads * (op.nope + op.v_dim), op.kv_lora))
    if op.sinks:
        yield f"{path}.sinks", Expected((op.heads,), "bias")
    if op.index is not None and not op.index.share:
        yield from _index(f"{path}.index", op.index, hidden, low or hidden)
    if op.gate is not None:
        rows = op.heads if op.gate.per == "head" else op.heads * op.v_dim
        yield from linear(f"{path}.gate", rows, op.q_source if op.gate.source == "q_lora" else hidden, False)
    yield from linear(f"{path}.o", hidden, op.heads * op.v_dim, op.bias)


def _index(path: str, index: Index, hidden: int, low: int) -> Iterator[tuple[str, Expected]]:
    source = low if index.q_from == "q_lora" else hidden
    yield from linear(f"{path}.q", index.heads * index.dim, source, False)
    yield from norm(f"{path}.q_norm", index.q_norm, index.dim).items()
    yield from linear(f"{path}.k", index.dim, hidden, False)
    yield from norm(f"{path}.k_norm", index.k_norm, index.dim).items()
    if index.kind == "dsa":
        yield f"{path}.w.weight", Expected((index.heads, hidden))


MIXERS: dict[type[Any], Callable[[str, Any, int], Iterator[tuple[str, Expected]]]] = {
    Attention: _attention,
    Mla: _mla,
    Delta: _delta,
    Mamba2: _mamba2,
    Mamba1: _mamba1,
    ShortConv: _short_conv,
    Csa: _csa,
    DecayAttention: _decay_attention,
    Rglru: _rglru,
    Rwkv4: _rwkv4,
}
"""Takes the path of an op's weights, the op and the model's width; yields its weights."""
