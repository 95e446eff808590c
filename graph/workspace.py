"""Bytes that exist only inside a step: the widest layer, what kernels leave for each other, logits. No torch here."""

from __future__ import annotations

from treadle.graph.buckets import MAX_CAPTURED_TOKENS
from treadle.graph.expert_rows import workspace_bytes
from treadle.graph.footprint import MemoryRow, moes, ops
from treadle.graph.recurrent_rows import delta_bytes, selective_bytes, ssm_bytes
from treadle.graph.recurrent_width import recurrent_width
from treadle.graph.spec import (
    Attention,
    Csa,
    DecayAttention,
    Delta,
    Mamba1,
    Mamba2,
    Mla,
    Mlp,
    ModelSpec,
    Moe,
    Op,
    Rglru,
    Rwkv4,
)
from treadle.graph.state import ITEM_BYTES

LIBRARY_BYTES = 64 << 20
"""What the library of matrix products keeps on a GPU."""
LOGPROB_ROWS = 32
"""Rows whose log-probabilities are made at a time, so that those of a large vocabulary need little memory."""
PARTIAL_BYTES = 40 << 20
"""The most that splits of a long history leave for each other on a GPU; attention makes no more splits than fit."""
WIDENED_BYTES = 32 << 20
"""How much of an int8 weight is widened at a time for a large step on a GPU."""
CHOICE_BYTES = 64 << 20
"""Scores that a sparse attention on a GPU holds at once while it chooses keys; it takes rows in blocks of so much."""
INVARIANT_ROWS = 128
"""Rows of each call of the library of matrix products, where a row's result may depend on that row alone. On an H200
all products of a step of an 8B model take 4.9 ms with so many, 4.1 ms with one."""


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
            for _, op in moes(spec)
        ),
        default=0,
    )


def chunks_bytes(spec: ModelSpec, tokens: int, sequences: int, item: int) -> int:
    """Return what the widest op with a recurrent state holds of a step's chunks on a GPU; 0 without one."""

    def held(op: Op) -> int:
        match op:
            case Delta():
                return delta_bytes(tokens, sequences, op.v_heads, op.k_dim, op.v_dim, op.decay == "channel", item)
            case Mamba1():
                return selective_bytes(tokens, op.inner, op.state)
            case Mamba2():
                return ssm_bytes(tokens, op.heads, op.head_dim, op.state)
            case DecayAttention():
                return ssm_bytes(tokens, op.heads, op.head_dim, op.head_dim)
            case _:
                return 0

    return max(held(op) for op in ops(spec))


def workspace_rows(
    spec: ModelSpec, dtype: str, quantize: str, device: str, max_num_seqs: int, max_step_tokens: int
) -> list[MemoryRow]:
    """Return bounds of what a step needs while it runs: the widest layer, and the rows that are sampled from."""
    item = ITEM_BYTES[dtype]
    inside = max(_live_width(op, spec.hidden, device) + recurrent_width(op, spec.hidden, item) for op in ops(spec))
    width = (3 * spec.hidden + inside) * item
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
    sparse = any(isinstance(op, Attention | Mla) and op.index is not None for op in ops(spec))
    choice = 2 * CHOICE_BYTES if sparse else 0
    chunks = chunks_bytes(spec, max_step_tokens, max_num_seqs, item)
    kernels = experts_bytes(spec, tokens, item) + chunks_bytes(spec, tokens, max_num_seqs, item)
    captured = tokens * width + kernels + logits + PARTIAL_BYTES + widened + choice
    return [
        activations,
        *([MemoryRow("workspace", f"experts of {max_step_tokens} tokens", experts)] if experts else []),
        *([MemoryRow("workspace", f"states over {max_step_tokens} tokens", chunks)] if chunks else []),
        MemoryRow("workspace", f"logits of {max_num_seqs} rows", logits),
        MemoryRow("workspace", "matrix products", LIBRARY_BYTES + widened),
        MemoryRow("workspace", "attention in parts", PARTIAL_BYTES),
        *([MemoryRow("workspace", "choice of keys", choice)] if choice else []),
        MemoryRow("graphs", f"captured steps of up to {tokens} tokens", captured),
    ]


def _live_width(op: Op, hidden: int, device: str) -> int:
    """Return channels that live at once inside an op, a token.

    Attention: queries, keys, values and output. A feed-forward: gate, up and product; experts hold these of every
    expert that a token visits, their inputs and results, and the logits they were chosen by; on a GPU only the latter,
    since ``experts_bytes`` counts the rest.
    """
    match op:
        case Attention():
            # what a bias by distance is made of, itself, and a copy that grows with positions
            bias = op.heads * (op.rel.dim + op.rel.extent * (2 if op.q_temperature else 1)) if op.rel is not None else 0
            # queries and key of the choice, and what is chosen: int32
            index = op.index.heads * (op.index.dim + 2 * op.index.topk) + op.index.dim if op.index is not None else 0
            return (op.heads + op.kv_heads) * (op.head_dim + op.v_head_dim) + op.heads * op.head_dim + bias + index
        case Mla():
            # queries plain and in terms of latents, what is cached, and the result as latents and as values
            row = op.kv_lora + op.rope_dim
            index = op.index.heads * op.index.dim + 4 * op.index.topk if op.index is not None else 0
            inside = op.nope + op.rope_dim + row + 2 * op.kv_lora + 2 * op.v_dim
            return op.heads * inside + 2 * row + 2 * (op.q_lora or 0) + index
        case Mlp():
            return 3 * op.intermediate
        case Moe():
            shared = 3 * op.shared.intermediate + hidden if op.shared is not None else 0
            visited = op.top_k + op.router.always
            # logits, scores and what a choice is made of are float32: at most two channels each
            inside = visited * (3 * op.intermediate + 2 * hidden) if device == "cpu" else 4 * visited
            return inside + shared + 6 * (op.experts + op.zero_experts)
        case Csa():
            choice = op.compress.index if op.compress is not None else None
            small = choice.heads * choice.dim if choice is not None else 0
            return 3 * op.heads * op.head_dim + 2 * op.row + op.q_lora + op.o_groups * op.o_lora + small
        case DecayAttention():
            return 5 * op.heads * op.head_dim
        case Rglru():
            return 6 * op.width
        case Rwkv4():
            return 4 * op.width + 4 * hidden
        case _:
            return 0
