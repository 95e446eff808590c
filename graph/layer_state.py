"""What each op keeps between steps: the one place that both the graph and the memory plan ask. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from treadle.graph.mixers import Attention, Csa, DecayAttention, Delta, Mamba1, Mamba2, Mla, Rglru, Rwkv4, ShortConv
from treadle.graph.spec import ModelSpec, Op, Sub
from treadle.graph.state import BlockPart, LayerKV, Slot, State, StateBuilder


class Shaped(Protocol):
    """Anything that knows the shape of a canonical weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dims."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The states of one op, by the name under which its body knows each."""

    appended: Mapping[str, LayerKV]
    window: int = 0
    chunk: int = 0
    parts: Mapping[str, BlockPart]

    def place(self, builder: StateBuilder) -> dict[str, Slot]:
        """Return a slot for every state, those that are appended first."""
        slots = {name: builder.append(layer, self.window, self.chunk) for name, layer in self.appended.items()}
        return slots | {name: builder.keep(part) for name, part in self.parts.items()}


class Weights(NamedTuple):
    """What an op's states may depend on beside the op: the shapes of its weights, and the model's dtype."""

    path: str
    """what the names of the op's weights begin with"""
    tensors: Mapping[str, Shaped]
    """all canonical weights"""
    dtype: str


NOTHING = Kept(appended={}, parts={})


def _attention(op: Attention, weights: Weights) -> Kept:
    if op.kv_from is not None:
        return NOTHING
    layer = LayerKV(kv_heads=op.kv_heads, k_dim=op.head_dim, v_dim=op.cached_v_dim)
    widths = {"k_conv": op.kv_heads * op.head_dim, "v_conv": op.kv_heads * op.v_head_dim} if op.kv_conv else {}
    parts = {name: _conv(width, op.kv_conv, weights) for name, width in widths.items()}
    appended = {"kv": layer}
    if op.index is not None:
        appended["keys"] = LayerKV(kv_heads=1, k_dim=op.index.dim, v_dim=0, kind="index")
    return Kept(appended=appended, window=op.window, chunk=op.chunk, parts=parts)


def _mla(op: Mla, weights: Weights) -> Kept:
    # A layer may have several such ops: their states are told apart by the sublayer's name.
    name = weights.path.rpartition(".")[2]
    appended = {f"{name}_latent": LayerKV(kv_heads=1, k_dim=op.kv_lora + op.rope_dim, v_dim=0, kind="latent")}
    if op.index is not None and not op.index.share:
        appended[f"{name}_keys"] = LayerKV(kv_heads=1, k_dim=op.index.dim, v_dim=0, kind="index")
    return Kept(appended=appended, window=op.window, parts={})


def _delta(op: Delta, weights: Weights) -> Kept:
    learned = BlockPart(kind="delta", shape=(op.v_heads, op.k_dim, op.v_dim), dtype="float32")
    return Kept(appended={}, parts={"conv_state": _conv(sum(op.channels), op.conv, weights), "delta_state": learned})


def _mamba2(op: Mamba2, weights: Weights) -> Kept:
    scanned = BlockPart(kind="ssm", shape=(op.heads, op.head_dim, op.state), dtype="float32")
    return Kept(appended={}, parts={"conv_state": _conv(sum(op.channels), op.conv, weights), "ssm_state": scanned})


def _mamba1(op: Mamba1, weights: Weights) -> Kept:
    scanned = BlockPart(kind="ssm", shape=(op.inner, op.state), dtype="float32")
    return Kept(appended={}, parts={"conv_state": _conv(op.inner, op.conv, weights), "ssm_state": scanned})


def _short_conv(op: ShortConv, weights: Weights) -> Kept:
    channels = weights.tensors[f"{weights.path}.conv.weight"].shape[0]
    return Kept(appended={}, parts={"conv_state": _conv(channels, op.kernel, weights)})


def _decay_attention(op: DecayAttention, _: Weights) -> Kept:
    learned = BlockPart(kind="delta", shape=(op.heads, op.head_dim, op.head_dim), dtype="float32")
    return Kept(appended={}, parts={"scan_state": learned})


def _rglru(op: Rglru, weights: Weights) -> Kept:
    scanned = BlockPart(kind="lru", shape=(op.width,), dtype="float32")
    return Kept(appended={}, parts={"conv_state": _conv(op.width, op.conv, weights), "lru_state": scanned})


def _rwkv4(op: Rwkv4, weights: Weights) -> Kept:
    hidden = weights.tensors[f"{weights.path}.mix_k"].shape[-1]
    parts = {f"{op.part}_shift": BlockPart(kind="shift", shape=(hidden,), dtype=weights.dtype)}
    if op.part == "time":
        parts["wkv_state"] = BlockPart(kind="wkv", shape=(3, op.width), dtype="float32")
    return Kept(appended={}, parts=parts)


def _csa(op: Csa, _: Weights) -> Kept:
    # With compressed rows nothing is ever out of sight: they are made of what all tokens left.
    layer = LayerKV(kv_heads=1, k_dim=op.row, v_dim=0, kind="latent")
    return Kept(appended={"rows": layer}, window=0 if op.compress else op.window, parts={})


def _conv(channels: int, width: int, weights: Weights) -> BlockPart:
    """Return the tail of inputs that a short convolution keeps."""
    return BlockPart(kind="conv", shape=(width - 1, channels), dtype=weights.dtype)


KEEPS: dict[type[Any], Callable[[Any, Weights], Kept]] = {
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
"""By the kind of op; one that is not here keeps nothing."""


def kept_behind(sub: Sub, hidden: int, weights: Weights) -> Kept:
    """Return what a sublayer keeps beside its op: the tail of the convolution behind it."""
    if not sub.post_conv:
        return NOTHING
    return Kept(appended={}, parts={f"{sub.name}_post_conv": _conv(hidden, sub.post_conv, weights)})


def kept_by(op: Op, weights: Weights) -> Kept:
    """Return what ``op`` keeps of a sequence between steps."""
    keeps = KEEPS.get(type(op))
    return NOTHING if keeps is None else keeps(op, weights)


def state_of(spec: ModelSpec, tensors: Mapping[str, Shaped], builder: StateBuilder) -> State:
    """Return what all layers of a model keep, in layer order."""
    for layer in spec.layers:
        for sub in layer.subs:
            parts = [(sub.name, sub.op), *((branch.name, branch.op) for branch in sub.branches)]
            for name, op in parts:
                if op is not None:
                    weights = Weights(f"layers.{layer.index}.{name}", tensors, builder.dtype)
                    kept_by(op, weights).place(builder)
            kept_behind(sub, spec.hidden, Weights("", tensors, builder.dtype)).place(builder)
    return builder.state()
