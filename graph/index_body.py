"""The ops of a sparse choice of keys: a small attention of its own says which keys the attention behind it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from treadle.graph.ir import Role
from treadle.graph.layer_writer import LayerWriter
from treadle.graph.spec import Index, SpecError

CHOICE = "choice"
"""The stream in which a layer's choice reaches layers that have none of their own."""


def write_index(
    writer: LayerWriter, index: Index, h: Node, low: Node, state: Sequence[Node], path: str, name: str
) -> Node:
    """Append the choice of each token's keys, [T, N] int32; ``low`` is the latent of queries, ``state`` the side keys.

    One that is shared is the choice of the last layer before that made one.
    """
    count = min(index.topk, writer.model.options.max_len)
    if index.share:
        if next(_indices(writer)).share:
            raise SpecError(f"{path}: share = true, and no layer before has a choice of its own")
        return writer.input(CHOICE, Role.STREAM, ("T", count), torch.int32)
    q, k = side_parts(writer, index, h, low, path, name)
    steps = [writer.step(field) for field in ("seq_ids", "positions", "q_starts", "kv_lens")]
    chosen = writer.op("index_select", q, k, _weights(writer, h, path, name), *state, *steps, count, label=name)
    if _is_shared(writer):
        writer.passed_on[CHOICE] = chosen
    return chosen


def side_parts(writer: LayerWriter, index: Index, h: Node, low: Node, path: str, name: str) -> tuple[Node, Node]:
    """Append the queries [T, heads, dim] and keys [T, dim] of a choice."""
    q = writer.linear(low if index.q_from == "q_lora" else h, f"{path}.q", f"{name}_q")
    q = writer.view(q, (-1, index.heads, index.dim), f"{name}_q_heads")
    q = _turned(writer, index, writer.norm(index.q_norm, q, f"{path}.q_norm", f"{name}_q_norm"), f"{name}_q")
    k = writer.linear(h, f"{path}.k", f"{name}_k")
    k = writer.norm(index.k_norm, k, f"{path}.k_norm", f"{name}_k_norm")
    if index.rope is not None:
        k = _turned(writer, index, writer.view(k, (-1, 1, index.dim), f"{name}_k_head"), f"{name}_k")
        k = writer.view(k, (-1, index.dim), f"{name}_k_turned")
    return q, k


def _turned(writer: LayerWriter, index: Index, x: Node, name: str) -> Node:
    if index.rope is None:
        return x
    table = writer.rope_rows(index.rope)
    return writer.op("rope", x, writer.step("positions"), table, index.layout, index.at, label=f"{name}_rope")


def _weights(writer: LayerWriter, h: Node, path: str, name: str) -> Node:
    """Return how much each head counts, in float32 as what is chosen by it is all or nothing: [T, heads]."""
    if writer.model.dtype != torch.float32:
        h = writer.call(torch.ops.aten._to_copy.default, h, dtype=torch.float32, label=f"{name}_in")
    weight = writer.bind(f"{name}_w", writer.leaf(f"{path}.w.weight", "float32"))
    return writer.op("linear", h, weight, None, label=f"{name}_weights")


def _is_shared(writer: LayerWriter) -> bool:
    """Return whether some layer of the model reads another's choice."""
    return any(index.share for index in _indices(writer))


def _indices(writer: LayerWriter) -> Iterator[Index]:
    """Return the choices of all layers, in order."""
    found = (getattr(sub.op, "index", None) for layer in writer.model.spec.layers for sub in layer.subs)
    return (index for index in found if isinstance(index, Index))
