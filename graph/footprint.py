"""Bytes of the parts of a deployment, from its description alone: weights, tables, workspace, the runtime itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from treadle.graph.buckets import MAX_CAPTURED_TOKENS, Buckets, assign_buckets, largest_shape
from treadle.graph.checkpoint import WeightInfo
from treadle.graph.demand import BLOCK_NAME, KindPlan
from treadle.graph.expert_rows import workspace_bytes
from treadle.graph.packet import MAX_ASKED, SLOT_WIDTH, StepShape, control_bytes, packet_capacity
from treadle.graph.spec import Attention, Mlp, ModelSpec, Moe, Op, RopeTable
from treadle.graph.state import ITEM_BYTES, State

INT8_GROUP = 32
"""Input channels that share a scale under weight-only int8."""
RUNTIME_BYTES = {"cpu": 448 << 20, "cuda": 640 << 20}
"""CPU: interpreter, torch and inductor (416 MiB measured). GPU: an allowance for its context and libraries."""
LIBRARY_BYTES = 64 << 20
"""What the library of matrix products keeps on a GPU."""
LOGPROB_ROWS = 32
"""Rows whose log-probabilities are made at a time, so that those of a large vocabulary need little memory."""
SAMPLED_BYTES = 8 + 4 + 8 + 20 * (8 + 4) + MAX_ASKED * 4
"""What a row of logits gives back: token, log-probability, rank, the likeliest tokens with theirs, and asked ones."""
PARTIAL_BYTES = 40 << 20
"""The most that splits of a long history leave for each other on a GPU; attention makes no more splits than fit."""
INVARIANT_ROWS = 128
"""Rows of each call of the library of matrix products, where a row's result may depend on that row alone. On an H200
all products of a step of an 8B model take 4.9 ms with so many, 4.1 ms with one."""
WIDENED_BYTES = 32 << 20
"""How much of an int8 weight is widened at a time for a large step on a GPU."""

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
    return tuple(dict.fromkeys(op.rope for op in ops(spec) if isinstance(op, Attention) and op.rope is not None))


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
    reach = sum(
        op.heads * (op.head_dim + op.v_head_dim) for op in ops(spec) if isinstance(op, Attention) and not op.window
    )
    return linear / reach / ATTENTION_SLOWNESS if reach else math.inf


def weight_rows(
    spec: ModelSpec, weights: Mapping[str, WeightInfo], dtype: str, quantize: str, device: str
) -> list[MemoryRow]:
    """Return the exact bytes of all weights by what they belong to; under int8 the scales are rows of their own."""
    sizes: dict[str, int] = {}
    wide = set(_float32_weights(spec))
    for name, info in weights.items():
        count = math.prod(info.shape)
        linear = name != "embed.weight" or spec.head.tied
        if quantize == "int8" and linear and _quantises(name, info, device):
            nbytes = count
            scales = f"{EXPERTS}, int8 scales" if len(info.shape) > 2 else "int8 scales"
            sizes[scales] = sizes.get(scales, 0) + count // INT8_GROUP * 4
        else:
            nbytes = count * ITEM_BYTES["float32" if name in wide else dtype]
        owner = _owner(name, info, spec.head.tied)
        sizes[owner] = sizes.get(owner, 0) + nbytes
    return [MemoryRow("weights", owner, nbytes) for owner, nbytes in sizes.items()]


def token_weight_bytes(spec: ModelSpec, rows: Iterable[MemoryRow]) -> float:
    """Return the bytes of weights that a step of one token reads: all but the embedding's and most experts'."""
    shares = list(_visited_share(spec).values())
    share = sum(shares) / len(shares) if shares else 1.0
    return sum(
        row.nbytes * (share if row.item.startswith(EXPERTS) else 1.0)
        for row in rows
        if row.kind == "weights" and row.item != "embedding"
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
    pairs = {op.kv_heads for op in attentions if op.diff is not None}
    if pairs:
        yield MemoryRow("tables", "pairs of values", sum(2 * kv_heads * 8 for kv_heads in pairs))


def history_row(max_num_seqs: int, max_len: int) -> MemoryRow:
    """Return the exact bytes of every token of every sequence, which logits processors see."""
    return MemoryRow(
        "tables", f"tokens of {max_num_seqs} sequences for logits processors", (max_num_seqs + 1) * max_len * 4
    )


def experts_bytes(spec: ModelSpec, tokens: int, item: int) -> int:
    """Return what the widest mixture of experts holds at once on a GPU beside its input and result; 0 without one."""
    return max(
        (
            workspace_bytes(
                tokens,
                op.top_k + op.router.always,
                op.experts + op.router.always,
                spec.hidden,
                op.intermediate,
                item,
            )
            for _, op in _moes(spec)
        ),
        default=0,
    )


def workspace_rows(
    spec: ModelSpec, dtype: str, quantize: str, device: str, max_num_seqs: int, max_step_tokens: int
) -> list[MemoryRow]:
    """Return bounds of what a step needs while it runs: the widest layer, and the rows that are sampled from."""
    item = ITEM_BYTES[dtype]
    width = (3 * spec.hidden + max(_live_width(op, spec.hidden, device) for op in ops(spec))) * item
    activations = MemoryRow("workspace", f"activations of {max_step_tokens} tokens", max_step_tokens * width)
    if device == "cpu":
        # logits as computed, and in float32 three times: themselves, probabilities, a sorted copy
        logits = max_num_seqs * spec.vocab * (item + 3 * 4)
        return [activations, MemoryRow("workspace", f"logits of {max_num_seqs} rows", logits)]
    # Log-probabilities are made of a block of rows at a time.
    logits = max_num_seqs * spec.vocab * item + min(max_num_seqs, LOGPROB_ROWS) * spec.vocab * 4 * 4
    # Captured steps have memory of their own, the same for all of them.
    tokens = min(max_step_tokens, MAX_CAPTURED_TOKENS)
    widened = WIDENED_BYTES if quantize == "int8" else 0
    experts = experts_bytes(spec, max_step_tokens, item)
    captured = tokens * width + experts_bytes(spec, tokens, item) + logits + PARTIAL_BYTES + widened
    return [
        activations,
        *([MemoryRow("workspace", f"experts of {max_step_tokens} tokens", experts)] if experts else []),
        MemoryRow("workspace", f"logits of {max_num_seqs} rows", logits),
        MemoryRow("workspace", "matrix products", LIBRARY_BYTES + widened),
        MemoryRow("workspace", "attention in parts", PARTIAL_BYTES),
        MemoryRow("graphs", f"captured steps of up to {tokens} tokens", captured),
    ]


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


def _moes(spec: ModelSpec) -> Iterator[tuple[str, Moe]]:
    """Return every mixture of experts and the path of its weights."""
    for layer in spec.layers:
        for sub in layer.subs:
            parts = [(sub.name, sub.op), *((branch.name, branch.op) for branch in sub.branches)]
            yield from ((f"layers.{layer.index}.{name}", op) for name, op in parts if isinstance(op, Moe))


def _visited_share(spec: ModelSpec) -> dict[str, float]:
    """Return, for every stack of experts, the share that a token visits."""
    return {
        f"{path}.{part}": op.top_k / (op.experts + op.zero_experts)
        for path, op in _moes(spec)
        for part in ("gate", "up", "down")
    }


def _float32_weights(spec: ModelSpec) -> Iterator[str]:
    """Return the weights that stay in float32 whatever the model's dtype: those that experts are chosen by."""
    for path, op in _moes(spec):
        yield from (f"{path}.correction", f"{path}.expert_scale")
        if op.router.dtype == "float32":
            yield from (f"{path}.router.weight", f"{path}.router.bias")


def _is_product(name: str, info: WeightInfo) -> bool:
    """Return whether a weight is a matrix, or a stack of them, and not the biases of a stack."""
    return len(info.shape) > 1 and not name.endswith("_bias")


def _quantises(name: str, info: WeightInfo, device: str) -> bool:
    """Return whether int8 takes a weight: no router, whose choices are all or nothing, and experts on a CPU only."""
    if not _is_product(name, info) or name.endswith(".router.weight"):
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
    if len(info.shape) > 2:
        return EXPERTS
    return name.split(".")[2] if name.startswith("layers.") else name


def _live_width(op: Op, hidden: int, device: str) -> int:
    """Return channels that live at once inside an op, a token.

    Attention: queries, keys, values and output. A feed-forward: gate, up and product; experts hold these of every
    expert that a token visits, their inputs and results, and the logits they were chosen by; on a GPU only the latter,
    since ``experts_bytes`` counts the rest.
    """
    match op:
        case Attention():
            return (op.heads + op.kv_heads) * (op.head_dim + op.v_head_dim) + op.heads * op.head_dim
        case Mlp():
            return 3 * op.intermediate
        case Moe():
            shared = 3 * op.shared.intermediate + hidden if op.shared is not None else 0
            visited = op.top_k + op.router.always
            # logits, scores and what a choice is made of are float32: at most two channels each
            inside = visited * (3 * op.intermediate + 2 * hidden) if device == "cpu" else 4 * visited
            return inside + shared + 6 * (op.experts + op.zero_experts)
        case _:
            return 0
