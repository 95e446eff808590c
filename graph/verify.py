"""What a graph promises at each level, checked after every pass. A broken promise is a bug of the pass."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from treadle.graph.ir import Body, Call, Graph, Level, Role, role
from treadle.graph.recurrent_ops import POINTWISE_SCHEMAS, STATE_SCHEMAS

VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.split_with_sizes.default,
        torch.ops.aten.index_select.default,
        torch.ops.aten._to_copy.default,
        operator.getitem,
    }
)
"""Calls that move, choose or convert but do not compute; they stand at every level as they are."""

POINTWISE = frozenset(
    [
        "embed",
        "add_positions",
        "linear",
        "norm",
        "add",
        "activation",
        "xielu",
        "act_mul",
        "affine",
        "rope",
        "q_temperature",
        "gate_heads",
        "differential",
        "linear_int8",
        "embed_int8",
        "route",
        "experts",
        "experts_int8",
        "identity_experts",
        *POINTWISE_SCHEMAS,
    ]
)
"""Ops that look at each token alone; they stand at both levels."""

LEVEL_OPS = {
    Level.MODEL: POINTWISE | STATE_SCHEMAS.keys() | {"attention"},
    Level.SHARDED: POINTWISE
    | STATE_SCHEMAS.keys()
    | {
        "add_norm",
        "gated_activation",
        "linear_add",
        "norm_gated_linear",
        "cache_write",
        "rope_cache_write",
        "norm_rope_cache_write",
        "paged_attention",
    },
}


class GraphError(AssertionError):
    """A pass left a graph that breaks a promise of its level: names the body, the node and the promise."""


def verify(graph: Graph) -> None:
    """Check that ``graph`` keeps what its level promises. Raises: GraphError."""
    for body in graph.bodies.values():
        _verify_body(graph, body)
    streams: dict[str, torch.Size] = {}
    for index, call in enumerate(graph.calls):
        where = f"call {index} of {call.body}"
        _require(call.body in graph.bodies, where, "its body is missing")
        body = graph.bodies[call.body]
        _verify_bindings(where, body, call)
        for node in body.placeholders:
            if role(node) is Role.STREAM:
                known = streams.get(node.name)
                _require(known is not None, where, f"reads {node.name}, which no call before it yields")
                _require(known == node.meta["val"].shape, where, f"reads {node.name} in another shape than was yielded")
        streams.update(zip(body.outputs, (value.meta["val"].shape for value in _returned(body))))
    _require("logits" in graph.bodies[graph.calls[-1].body].outputs, "the last call", "yields no logits")


def _verify_body(graph: Graph, body: Body) -> None:
    body.graph.lint()
    returned = _returned(body)
    _require(len(returned) == len(body.outputs), body.name, "returns another number of values than it names")
    for node in body.graph.nodes:
        where = f"{body.name}.{node.name}"
        if node.op == "placeholder":
            _verify_role(graph.level, where, role(node))
        elif node.op == "call_function":
            _require("val" in node.meta, where, "has no type")
            _require("origin" in node.meta, where, "does not say where it comes from")
            _verify_target(graph.level, where, node)
        else:
            _require(node.op == "output", where, f"is a {node.op}")


def _verify_role(level: Level, where: str, kind: Role) -> None:
    forbidden = Role.ARENA if level is Level.MODEL else Role.STATE
    _require(kind is not forbidden, where, f"{kind.value} has no place at level {level.value}")


def _verify_target(level: Level, where: str, node: Node) -> None:
    if node.target in VIEWS:
        return
    if level is Level.LOWERED:
        _require("kernel" in node.meta, where, "has no kernel chosen")
        return
    namespace, _, name = str(getattr(node.target, "_name", node.target)).partition("::")
    _require(
        namespace == "treadle" and name in LEVEL_OPS[level], where, f"{node.target} is no op of level {level.value}"
    )


def _verify_bindings(where: str, body: Body, call: Call) -> None:
    inputs = {node.name: node for node in body.placeholders if role(node) is Role.WEIGHT}
    _require(set(inputs) == set(call.weights), where, f"binds {sorted(set(inputs) ^ set(call.weights))} wrongly")
    for name, expr in call.weights.items():
        value = inputs[name].meta["val"]
        same = tuple(value.shape) == tuple(expr.shape) and value.dtype == getattr(torch, expr.dtype)
        _require(same, where, f"binds {name} to a weight of another type")
    for node in body.placeholders:
        _require(role(node) is not Role.STATE or node.name in call.states, where, f"has no slot for {node.name}")


def _returned(body: Body) -> tuple[Node, ...]:
    return tuple(body.graph.output_node().args[0])  # type: ignore[arg-type]


def _require(holds: bool, where: str, promise: str) -> None:
    if not holds:
        raise GraphError(f"{where}: {promise}")
