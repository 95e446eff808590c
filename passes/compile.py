"""Compile each body once with inductor, without Dynamo, for any number of tokens; keep the result on disk.

The body is traced down to aten over its own fake tensors: inline kernels dissolve into ops that inductor fuses, opaque
kernels stay calls. The arena enters as one byte tensor, so that state is written in place (a test bounds the memory).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.conf.errors import ConfigError
from treadle.graph.ir import Body, Graph, Level
from treadle.graph.target import Target
from treadle.kernels import native
from treadle.passes.artifact import load_or_compile
from treadle.passes.base import Pass

Compiled = Callable[..., Sequence[torch.Tensor]]
OFF = "passes.compile=false"
INVARIANT_OPTIONS = ("deterministic", "batch_invariant")
"""Of inductor, for deterministic targets."""


class CompileError(ConfigError):
    """A body that cannot be compiled here: which, why, and that it runs uncompiled too."""


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
            worth = is_worth_compiling(body, self.target.max_tokens)
            bodies[name] = replace(body, compiled=self._compile(body, graph)) if worth else body
        return graph.replace_bodies(bodies, graph.calls)

    def _compile(self, body: Body, graph: Graph) -> Compiled:
        import torch._inductor  # half a second, and only this pass needs it

        with graph.shapes.mode:
            values = [node.meta["val"] for node in body.placeholders]
            # Graphs are written without a device; here their inputs stand where they will be.
            inputs: list[Tensor | int | SymInt | None] = [
                torch.empty(value.shape, dtype=value.dtype, device=self.target.device) for value in values
            ]
            traced = make_fx(GraphModule(torch.nn.Module(), body.graph), tracing_mode="real")(*inputs)
        compiler = self._compiler()
        types = [graph.shapes.describe(value) for value in values]
        options: dict[str, object] = {"cpp.cxx": (compiler,)} if compiler else {}
        if self.target.deterministic:
            # As much as the installed version knows of; without, sizes of blocks are found by timing.
            options |= {name: True for name in INVARIANT_OPTIONS if hasattr(torch._inductor.config, name)}
        try:
            with torch._inductor.config.patch(options):
                return load_or_compile(Path(self.cache) / self._key(traced, types, compiler), traced, inputs)
        except Exception as error:
            raise CompileError(
                f"{body.name} cannot be compiled: {_reason(error)}", key="passes.compile", nearest=[OFF]
            ) from error

    def _compiler(self) -> str | None:
        """Return the C++ compiler, which inductor asks for even to load what is compiled; None where it needs none."""
        if self.target.device != "cpu":
            return None
        try:
            return native.compiler()
        except native.KernelBuildError as error:
            raise CompileError(str(error), key="passes.compile", nearest=[OFF]) from error

    def _key(self, traced: GraphModule, types: list[str], compiler: str | None) -> str:
        facts = (
            traced.code,
            types,
            # A set is written in another order by every process.
            replace(self.target, features=frozenset()),
            sorted(self.target.features),
            torch.__version__,
            torch.get_num_threads(),
            compiler and (compiler, native.compiler_version(compiler)),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _reason(error: BaseException) -> str:
    """Return one line of what inductor says at length: the first that names a compiler's error, else the last."""
    inner = getattr(error, "inner_exception", error)
    if isinstance(inner, OSError):
        return str(inner)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    found = next((line for line in lines if "error:" in line), lines[-1] if lines else "")
    return f"{type(inner).__name__}: {found[:300]}" if found else type(inner).__name__


def is_worth_compiling(body: Body, max_tokens: int | None) -> bool:
    """Return whether a program of steps of at most ``max_tokens`` gains by it; None: any number, and it does.

    If it is bounded, it is captured, and only ops that a compiler may join gain: two that are neither views nor calls
    of opaque kernels.
    """
    return max_tokens is None or sum(_is_plain(node.target) for node in body.ops) > 1


def _is_plain(target: object) -> bool:
    """Return whether a node computes something in plain torch: an inline kernel, or an op that returns no view."""
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    return target.namespace == "aten" and all(each.alias_info is None for each in target._schema.arguments)
