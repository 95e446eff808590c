"""Give every semantic op the kernel that will run it on the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite


@dataclass(frozen=True, kw_only=True)
class ChooseKernels(Pass):
    """The registry's first candidate for the target; with ``target.kernels`` "reference", plain torch everywhere."""

    level = Level.SHARDED
    target: Target

    def __call__(self, graph: Graph) -> Graph:
        """Return the LOWERED graph: each op an inline torch function or one opaque kernel."""
        registry.load_all()

        def edit(editor: BodyEditor, _: Call) -> None:
            for node in editor.find(*ops.SCHEMAS):
                kernel = self._choose(node)
                node.meta["kernel"] = kernel.name
                node.target = kernel.function

        return rewrite(graph, edit, Level.LOWERED)

    def _choose(self, node: Node) -> registry.Kernel:
        name = str(getattr(node.target, "_opname", ""))
        if self.target.kernels == "reference":
            return registry.reference(name)
        return registry.candidates(name, self.target, _attributes(node))[0]


def _attributes(node: Node) -> dict[str, Any]:
    """Return the constant arguments of a call, and under ``dtypes`` the element types of its tensors."""
    constants: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, value in arguments(node).items():
        if isinstance(value, Node):
            dtypes[name] = value.meta["val"].dtype
        else:
            constants[name] = value
    return {**constants, "dtypes": dtypes}
