"""Writes one body: adds inputs and op calls to a torch.fx graph and works out the type of each as it goes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from treadle.graph import ops
from treadle.graph.ir import Body, Role, Shapes

STEP_FIELDS: dict[str, tuple[tuple[str, ...], torch.dtype]] = {
    "token_ids": (("T",), torch.int64),
    "positions": (("T",), torch.int64),
    "seq_ids": (("T",), torch.int32),
    "q_starts": (("B1",), torch.int32),
    "kv_lens": (("B",), torch.int32),
    "page_table": (("B", "M"), torch.int32),
    "blocks": (("B",), torch.int32),
    "logit_rows": (("R",), torch.int64),
}
"""The metadata of a step (graph.program.StepInputs), as typed inputs of bodies; the page table is that of the call's
group."""


class BodyWriter:
    """Appends to a graph of its own, or to the one given. Names are made unique by torch.fx."""

    def __init__(self, shapes: Shapes, graph: FxGraph | None = None) -> None:
        self.shapes = shapes
        self.graph = graph if graph is not None else FxGraph()
        self.inputs: dict[str, Node] = {node.name: node for node in self.graph.find_nodes(op="placeholder")}

    def input(self, name: str, role: Role, shape: Sequence[int | str], dtype: torch.dtype) -> Node:
        """Return the placeholder called ``name``, made on first use. Its name is the key of its binding."""
        if name not in self.inputs:
            last = next(reversed(self.inputs.values()), None)
            with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
                node = self.graph.placeholder(name)
            assert node.name == name, f"input {name} is taken"
            node.meta.update(role=role, val=self.shapes.tensor(shape, dtype))
            self.inputs[name] = node
        return self.inputs[name]

    def step(self, name: str) -> Node:
        """Return the input for a field of StepInputs."""
        shape, dtype = STEP_FIELDS[name]
        return self.input(name, Role.STEP, shape, dtype)

    def call(self, target: Callable[..., Any], *args: Any, label: str, **kwargs: Any) -> Node:
        """Append a call and return its node; ``label`` names it and says where it comes from."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=label)
        node.meta["origin"] = label
        infer(node, self.shapes)
        return node

    def op(self, name: str, *args: Any, label: str, **kwargs: Any) -> Node:
        """Append a call of a semantic op."""
        return self.call(ops.op(name), *args, label=label, **kwargs)

    def view(self, x: Node, shape: Sequence[int], label: str) -> Node:
        """Append a view; -1 stands for the token dim."""
        return self.call(torch.ops.aten.view.default, x, list(shape), label=label)

    def choose(self, x: Node, dim: int, places: Node, label: str) -> Node:
        """Append the choice of the slices of ``dim`` that ``places`` lists."""
        return self.call(torch.ops.aten.index_select.default, x, dim, places, label=label)

    def item(self, x: Node, index: int, label: str) -> Node:
        """Append the choice of one result of a call that returns several."""
        return self.call(operator.getitem, x, index, label=label)

    def finish(self, name: str, outputs: Mapping[str, Node]) -> Body:
        """End the graph: it returns ``outputs`` in order."""
        self.graph.output(tuple(outputs.values()))
        self.graph.lint()
        return Body(name=name, graph=self.graph, outputs=tuple(outputs))


def infer(node: Node, shapes: Shapes) -> None:
    """Set ``node.meta["val"]`` by running the node's target on the fake values of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with shapes.mode:
        assert callable(node.target)
        node.meta["val"] = node.target(*args, **kwargs)
