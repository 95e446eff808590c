"""Bytes of the parts of a deployment, from its description alone: weights, tables, state, the runtime itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from treadle.graph.buckets import Buckets, assign_buckets, largest_shape
from treadle.graph.checkpoint import WeightInfo
from treadle.graph.demand import BLOCK_NAME, KindPlan
from treadle.graph.packet import MAX_ASKED, SLOT_WIDTH, StepShape, control_bytes, packet_capacity
from treadle.graph.spec import (
    Attention,
    Csa,
    DecayAttention,
    Delta,
    Mamba1,
    Mamba2,
    Mla,
    ModelSpec,
    Moe,
    Op,
    RopeTable,
    Rwkv4,
)
from treadle.graph.state import ITEM_BYTES, State

INT8_GROUP = 32
"""Input channels that share a scale under weight-only int8."""
RUNTIME_BYTES = {"cpu": 448 << 20, "cuda": 640 << 20}
"""CPU: interpreter, torch and inductor (416 MiB measured). GPU: an allowance for its context and libraries."""
SAMPLED_BYTES = 8 + 4 + 8 + 20 * (8 + 4) + MAX_ASKED * 4
"""What a row of logits gives back: token, log-probability, rank, the likeliest tokens with theirs, and asked ones."""

EXPERTS = "experts"
"""How rows begin whose weights only some tokens visit."""


ATTENTION_SLOWNESS = 3.0
"""How much longer an operation of attention takes than one of a large matrix product; a short chunk over a long context
on an H200: 225 against 700 TFLOP/s."""


@dataclass(frozen=True)
class MemoryRow:
    """One line of a memory plan."""

    kind: str
    """weights, state, tables, workspace, graphs or runtime"""
    item: str
    nbytes: int


def ops(spec: ModelSpec) -> Iterator[Op]:
    """Return the ops of every sublayer of every layer."""
    for layer in spec.layers:
        for sub in layer.subs:
            if sub.op is not None:
                yield sub.op
            yield from (branch.op for branch in sub.branches)


def rope_tables(spec: ModelSpec) -> tuple[RopeTable, ...]:
    """Return the distinct rope tables, in order of first use."""
    turning = [op for op in ops(spec) if isinstance(op, (Attention, Mla))]
    tables = [table for op in turning for table in (op.rope, op.index.rope if op.index else None) if table is not None]
    tables += [op.rope for op in ops(spec) if isinstance(op, Csa)]
    return tuple(dict.fromkeys(tables))


def attention_tokens(spec: ModelSpec, weights: Mapping[str, WeightInfo]) -> float:
    """Return the context, in tokens, at which attention takes a token of a prompt as long as its linear layers do.

    Infinite where every layer has a window. Of a stack of experts those count that a token visits. Operations count by
    how fast they run: ATTENTION_SLOWNESS.
    """
    visited = _visited_share(spec)
    linear = sum(
        math.prod(info.shape) * (visited.get(name, 1.0) if len(info.shape) > 2 else 1.0)
        for name, info in weights.items()
        if _is_product(name, info) and name.startswith("layers.")
    )
    reach = sum(_reach(op) for op in ops(spec))
    return linear / reach / ATTENTION_SLOWNESS if reach else math.inf


def _reach(op: Op) -> int:
    """Return the products that a token costs for each key that it sees; 0 where those do not grow with the context."""
    match op:
        case Attention() if not op.window:
            return op.heads * (op.head_dim + op.v_head_dim)
        case Mla() if op.index is not None:
            return 0 if op.index.share else op.index.heads * op.index.dim
        case Mla() if not op.window:
            return op.heads * (2 * op.kv_lora + op.rope_dim)
        case Csa() if op.compress is not None:
            return 2 * op.heads * op.head_dim // op.compress.rate
        case _:
            return 0


def weight_rows(
    spec: ModelSpec, weights: Mapping[str, WeightInfo], dtype: str, quantize: str, device: str
) -> list[MemoryRow]:
    """Return the exact bytes of all weights by what they belong to; under int8 the scales are rows of their own."""
    sizes: dict[str, int] = {}
    wide = set(_float32_weights(spec))
    for name, info in weights.items():
        count = math.prod(info.shape)
        linear = name != "embed.weight" or spec.head.tied
        if quantize == "int8" and linear and name not in wide and _quantises(name, info, device):
            nbytes = count
            scales = f"{EXPERTS}, int8 scales" if len(info.shape) > 2 else "int8 scales"
            sizes[scales] = sizes.get(scales, 0) + count // INT8_GROUP * 4
        else:
            nbytes = count * ITEM_BYTES["float32" if name in wide else dtype]
        owner = _owner(name, info, spec.head.tied)
        sizes[owner] = sizes.get(owner, 0) + nbytes
    return [MemoryRow("weights", owner, nbytes) for owner, nbytes in sizes.items()]


PER_LAYER = "embedding of layers"


def token_weight_bytes(spec: ModelSpec, rows: Iterable[MemoryRow]) -> float:
    """Return the bytes of weights that a step of one token reads: all but the embedding's and most experts'."""
    shares = list(_visited_share(spec).values())
    share = sum(shares) / len(shares) if shares else 1.0
    return sum(
        row.nbytes * (share if row.item.startswith(EXPERTS) else 1.0)
        for row in rows
        if row.kind == "weights" and row.item not in ("embedding", PER_LAYER)
    )


def table_rows(
    spec: ModelSpec, state: State, device: str, max_num_seqs: int, max_step_tokens: int, max_len: int
) -> list[MemoryRow]:
    """Return the exact bytes of what grows with the longest sequence, and of what steps are described with."""
    buckets = assign_buckets(max_num_seqs, max_step_tokens) if device == "cuda" else Buckets()
    bound = largest_shape(StepShape(max_step_tokens, max_num_seqs, max_num_seqs), buckets)
    pages = state.full.pages_for(max_len) * len(state.groups)
    slots = (max_num_seqs + 1) * (pages * 4 + SLOT_WIDTH * 8) + bound.num_seqs * (pages + 1) * 4
    packet = packet_capacity(bound, pages) * 4 + bound.num_rows * SAMPLED_BYTES
    # On a CPU the host's copies, one for each step in flight, are in the same memory.
    copies = 1 if device == "cuda" else 3
    return [
        *(
            MemoryRow("tables", f"rope, {max_len} positions x {table.dim}", max_len * table.dim * 4)
            for table in rope_tables(spec)
        ),
        *_position_rows(spec, state.full.dtype, max_len),
        MemoryRow("tables", "layer offsets", state.num_slots * 8),
        MemoryRow("tables", f"page tables and slots of {max_num_seqs} sequences", slots),
        MemoryRow(
            "tables", f"penalties and masks of {max_num_seqs} sequences", (max_num_seqs + 1) * control_bytes(spec.vocab)
        ),
        MemoryRow("tables", f"descriptions of steps of {max_step_tokens} tokens", copies * packet),
    ]


def _position_rows(spec: ModelSpec, dtype: str, max_len: int) -> Iterator[MemoryRow]:
    """Return the tables of positions that are computed, other than rope's."""
    positions = spec.embed.positions
    if positions is not None and positions.kind == "sinusoidal":
        rows = max_len + positions.offset
        yield MemoryRow("tables", f"position vectors, {rows} x {spec.hidden}", rows * spec.hidden * ITEM_BYTES[dtype])
    attentions = [op for op in ops(spec) if isinstance(op, Attention)]
    slopes = {(op.heads, op.alibi, op.alibi.scaled and op.scale) for op in attentions if op.alibi is not None}
    if slopes:
        yield MemoryRow("tables", "slopes of heads", sum(heads * 4 for heads, _, _ in slopes))
    rates = {(op.heads, op.rate) for op in ops(spec) if isinstance(op, DecayAttention)}
    if rates:
        yield MemoryRow("tables", "decays of heads", sum(heads * 4 for heads, _ in rates))
    if spec.per_layer_input is not None:
        yield MemoryRow("tables", "indices of layers", len(spec.layers) * 8)
    pairs = {op.kv_heads for op in attentions if op.diff is not None}
    if pairs:
        yield MemoryRow("tables", "pairs of values", sum(2 * kv_heads * 8 for kv_heads in pairs))


def history_row(max_num_seqs: int, max_len: int) -> MemoryRow:
    """Return the exact bytes of every token of every sequence, which logits processors see."""
    return MemoryRow(
        "tables", f"tokens of {max_num_seqs} sequences for logits processors", (max_num_seqs + 1) * max_len * 4
    )


def state_rows(state: State, arena_bytes: int, num_pages: int, kinds: Iterable[KindPlan]) -> list[MemoryRow]:
    """Return the bytes of the arena: what ``kinds`` are planned to take, and what is left beside them.

    Where there is but one kind it may have everything.
    """
    if not state.needs_checkpoints:
        pages = f"kv cache, {num_pages} pages of {state.page_tokens} tokens and a scratch page"
        return [MemoryRow("state", pages, arena_bytes)]
    rows = []
    for kind in kinds:
        count = kind.planned_bytes // kind.item_bytes
        what = f"{count} blocks" if kind.name == BLOCK_NAME else f"{count} pages of {state.page_tokens} tokens"
        rows.append(MemoryRow("state", f"{kind.name}, {what}", kind.planned_bytes))
    left = arena_bytes - state.scratch_bytes - sum(row.nbytes for row in rows)
    beside = "beside these full sequences, for what is kept of earlier ones"
    return [*rows, MemoryRow("state", beside, left), MemoryRow("state", "scratch", state.scratch_bytes)]


def runtime_row(device: str) -> MemoryRow:
    """Return what the process takes before it holds anything."""
    return MemoryRow("runtime", "interpreter and torch", RUNTIME_BYTES[device])


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number in 1 .. ``limit`` that fits, 0 if none; what is smaller than a fit fits too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _paths(spec: ModelSpec) -> Iterator[tuple[str, Op]]:
    """Return every op and the path of its weights."""
    for layer in spec.layers:
        for sub in layer.subs:
            parts = [(sub.name, sub.op), *((branch.name, branch.op) for branch in sub.branches)]
            yield from ((f"layers.{layer.index}.{name}", op) for name, op in parts if op is not None)


def moes(spec: ModelSpec) -> Iterator[tuple[str, Moe]]:
    """Return every mixture of experts and the path of its weights."""
    yield from ((path, op) for path, op in _paths(spec) if isinstance(op, Moe))


def _visited_share(spec: ModelSpec) -> dict[str, float]:
    """Return, for every stack of experts, the share that a token visits."""
    return {
        f"{path}.{part}": op.top_k / (op.experts + op.zero_experts)
        for path, op in moes(spec)
        for part in ("gate", "up", "down")
    }


def _float32_weights(spec: ModelSpec) -> Iterator[str]:
    """Return the weights that stay in float32 whatever the model's dtype: what experts are chosen by, what says how
    states decay, and what mixes residual streams."""
    for path, op in _paths(spec):
        yield from (f"{path}.{name}" for name in _wide_parts(op))
    for layer in spec.layers:
        for sub in layer.subs:
            yield from (f"layers.{layer.index}.{sub.name}.{name}" for name in HYPER)
    yield from (f"head_mix.{name}" for name in HYPER)


HYPER = ("hc.fn", "hc.base", "hc.scale")
WIDE = (".router.weight", ".index.w.weight", ".kv_b.weight")
"""Products that int8 leaves alone: choices, and a matrix that is cut into one for each head."""
NO_LINEAR = (
    ".hc.fn", ".hash", ".ape", ".res.proj.weight", "ple.embed", ".in_gate.weight", ".a_gate.weight", ".o_a.weight",
)  # fmt: skip
"""Tensors of several dims that no linear layer multiplies by."""


def _wide_parts(op: Op | None) -> tuple[str, ...]:
    match op:
        case Moe():
            # a table of ids has 32 bits too
            chosen = ("correction", "expert_scale", "router_scale", "hash")
            return (*chosen, *(("router.weight", "router.bias") if op.router.dtype == "float32" else ()))
        case Delta() | Mamba1() | Mamba2():
            return ("A_log", "D", "dt_bias", "dt.bias")
        case Mla() if op.index is not None:
            return ("index.w.weight",)
        case Csa():
            small = ("comp.index.w.weight", "comp.index.ape", "comp.index.norm.weight")
            return ("comp.ape", "comp.norm.weight", *small)
        case Rwkv4():
            return ("decay", "first")
        case _:
            return ()


def _is_product(name: str, info: WeightInfo) -> bool:
    """Return whether a weight is a matrix, or a stack of them, and not the biases of a stack."""
    return len(info.shape) > 1 and not name.endswith("_bias")


def _quantises(name: str, info: WeightInfo, device: str) -> bool:
    """Return whether int8 takes a weight: no router, whose choices are all or nothing, and experts on a CPU only."""
    if not _is_product(name, info) or name.endswith((*WIDE, *NO_LINEAR)):
        return False
    if len(info.shape) > 2:
        # an expert's two matrices are quantised together
        return device == "cpu" and not any(size % INT8_GROUP for size in info.shape[-2:])
    return info.shape[-1] % INT8_GROUP == 0


def _owner(name: str, info: WeightInfo, tied: bool) -> str:
    if name == "embed.weight":
        return "embedding and head" if tied else "embedding"
    if not _is_product(name, info):
        return "norms and biases"
    if name == "head.weight":
        return "head"
    if name == "ple.embed":
        return PER_LAYER
    if len(info.shape) > 2 and not name.endswith(NO_LINEAR):
        return EXPERTS
    return name.split(".")[2] if name.startswith("layers.") else name
