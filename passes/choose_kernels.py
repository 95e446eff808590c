"""Give every semantic op the kernel that will run it on the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from treadle.conf.errors import ConfigError
from treadle.graph import ops
from treadle.graph.ir import Call, Graph, Level
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.stopwatch import Stopwatch
from treadle.passes.base import BodyEditor, Pass, arguments, rewrite

UNSERVED = frozenset({"paged_compressed_attention"})
"""Ops of which a GPU has no kernel: a reference that goes through sequences on the host is no way to serve there, and
what it holds meanwhile is in no memory plan."""


@dataclass(frozen=True, kw_only=True)
class ChooseKernels(Pass):
    """The fastest candidate for the target, or the registry's first where nothing is measured.

    With ``target.kernels`` "reference", plain torch everywhere. For a deterministic target invariant kernels alone, of
    which nothing is measured: what is fastest for one size would not be for another.
    """

    level = Level.SHARDED
    target: Target
    stopwatch: Stopwatch | None = field(default=None, compare=False, repr=False)
    """times candidates on the device; None: nothing is measured"""

    def __call__(self, graph: Graph) -> Graph:
        """Return the LOWERED graph: each op an inline torch function or one opaque kernel.

        Raises: ConfigError for an op without a kernel for the target.
        """
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
        attributes = _attributes(node)
        found = registry.candidates(name, self.target, attributes)
        if name in UNSERVED and self.target.device != "cpu" and all(kernel.is_reference for kernel in found):
            raise ConfigError(
                f"{name} has no kernel for {self.target.device} yet",
                key="hardware.device",
                value=self.target.device,
                nearest=["hardware=cpu", "passes.kernels=reference"],
            )
        if not found:
            raise _unserved(name, self.target.device, attributes)
        if len(found) > 1 and not found[-1].inline:
            # A reference that cannot be traced looks at values on the host: what has it cannot be captured.
            found = found[:-1]
        if self.target.deterministic:
            return found[0]
        given = arguments(node)
        if self.stopwatch is None or len(found) == 1 or name in ops.WRITES_STATE or "arena" in given:
            return found[0]
        few = self.target.max_tokens
        calls = {}
        for tokens in (1, few) if few is not None else (64, 1024):
            description = f"{name} {tokens} {[_describe(value, tokens) for value in given.values()]}"
            calls[description] = partial(_random, given, tokens, self.target.device)
        return self.stopwatch.fastest(found, calls)


def _unserved(name: str, device: str, attributes: Mapping[str, Any]) -> ConfigError:
    """Return what to say of an op that no invariant kernel computes."""
    dtypes = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in attributes["dtypes"].values()}))
    return ConfigError(
        f"{name} of {dtypes} has no kernel for {device} that computes a row alike in every step",
        key="passes.deterministic",
        value="true",
        nearest=["passes.deterministic=false"],
    )


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


def _shape(node: Node, tokens: int) -> list[int]:
    """Return the shape of a node's value in a step of so many tokens."""
    return [size if isinstance(size, int) else tokens for size in node.meta["val"].shape]


def _describe(value: object, tokens: int) -> str:
    return f"{value.meta['val'].dtype}{_shape(value, tokens)}" if isinstance(value, Node) else repr(value)


def _random(given: Mapping[str, Any], tokens: int, device: str) -> dict[str, Any]:
    """Return the arguments of a call, random where they are tensors."""
    made = {}
    # tokens visit all experts, as they do in a model
    high = {"ids": given["down"].meta["val"].shape[0]} if "down" in given else {}
    for name, value in given.items():
        if isinstance(value, Node):
            shape, dtype = _shape(value, tokens), value.meta["val"].dtype
            if dtype.is_floating_point:
                value = torch.randn(shape, device=device).to(dtype)
            else:
                value = torch.randint(0, high.get(name, 2), shape, device=device).to(dtype)
        made[name] = value
    return made
