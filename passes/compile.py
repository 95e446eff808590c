"""Compile each body once with inductor, without Dynamo, for any number of tokens; keep the result on disk.

The body is traced down to aten over its own fake tensors: inline kernels dissolve into ops that inductor fuses, opaque
kernels stay calls. The arena enters as one byte tensor, so that state is written in place (a test bounds the memory).
"""

from __future__ import annotations

import hashlib
import operator
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.graph.ir import Body, Graph, Level
from treadle.graph.target import Target
from treadle.passes.base import Pass

if TYPE_CHECKING:
    from torch._inductor.standalone_compile import CompiledArtifact

Compiled = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Compile(Pass):
    """One artifact a body, under ``cache``/<hash of code, target and versions>."""

    level = Level.LOWERED
    target: Target
    cache: str
    """directory, made if missing"""
    progress: Callable[[int, int], None] | None = None
    """told (bodies done, bodies in all)"""

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with compiled bodies."""
        bodies: dict[str, Body] = {}
        for name, body in graph.bodies.items():
            if self.progress is not None:
                self.progress(len(bodies), len(graph.bodies))
            worth = self.target.max_tokens is None or _can_fuse(body)
            bodies[name] = replace(body, compiled=self._compile(body, graph)) if worth else body
        return graph.replace_bodies(bodies, graph.calls)

    def _compile(self, body: Body, graph: Graph) -> Compiled:
        # half a second, and only this pass needs it
        import torch._inductor
        from torch._inductor.standalone_compile import CompiledArtifact

        with graph.shapes.mode:
            values = [node.meta["val"] for node in body.placeholders]
            # Graphs are written without a device; here their inputs stand where they will be.
            inputs: list[Tensor | int | SymInt | None] = [
                torch.empty(value.shape, dtype=value.dtype, device=self.target.device) for value in values
            ]
            traced = make_fx(GraphModule(torch.nn.Module(), body.graph), tracing_mode="real")(*inputs)
        path = Path(self.cache) / self._key(traced, [graph.shapes.describe(value) for value in values])
        if not path.exists():
            with torch._inductor.config.patch(compile_threads=1):
                artifact = torch._inductor.standalone_compile(traced, inputs, dynamic_shapes="from_graph")
            _keep(artifact, path)
        return CompiledArtifact.load(path=str(path), format="unpacked")

    def _key(self, traced: GraphModule, types: list[str]) -> str:
        facts = (
            traced.code,
            types,
            self.target,
            sorted(self.target.features),
            torch.__version__,
            torch.get_num_threads(),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _can_fuse(body: Body) -> bool:
    """Return whether the body has two ops that a compiler may join: neither views nor calls of opaque kernels.

    A program that serves a bounded step is captured, so that alone they cost no more uncompiled.
    """
    return sum(_is_plain(node.target) for node in body.ops) > 1


def _is_plain(target: object) -> bool:
    """Return whether a node computes something in plain torch: an inline kernel, or an op that returns no view."""
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    return target.namespace == "aten" and all(each.alias_info is None for each in target._schema.arguments)


def _keep(artifact: CompiledArtifact, path: Path) -> None:
    """Save under ``path`` in one step, so that no other process sees half an artifact; the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(dir=path.parent, prefix=".new-")
    artifact.save(path=scratch, format="unpacked")
    try:
        os.rename(scratch, path)
    except OSError:
        shutil.rmtree(scratch)
