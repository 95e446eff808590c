"""Which kernels exist for each semantic op, and which of them a target may use.

A kernel is *inline* (plain torch, traced into a compiled body so that the compiler fuses it) or *opaque* (an operator
under ``torch.ops.treadle_kernels`` with the schema and the shape function of the semantic op). Every op has one
reference; it supports everything and is always the last candidate.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treadle.graph import ops

if TYPE_CHECKING:
    from treadle.graph.target import Target

Predicate = Callable[["Target", Mapping[str, Any]], bool]

OP_MODULES = (
    "embed",
    "add_positions",
    "linear",
    "norm",
    "add",
    "add_norm",
    "activation",
    "xielu",
    "linear_add",
    "norm_gated_linear",
    "affine",
    "rope",
    "q_temperature",
    "gate_heads",
    "differential",
    "attention",
    "cache_write",
    "rope_cache_write",
    "norm_rope_cache_write",
    "paged_attention",
    "linear_int8",
    "embed_int8",
    "route",
    "experts",
    "experts_int8",
    "identity_experts",
    "begin_step",
    "end_step",
    "multiply",
    "gated_norm",
    "time_step",
    "log_decay",
    "conv1d",
    "delta_rule",
    "ssm_scan",
    "selective_scan",
)
"""The files of this folder that register kernels, in the order in which they are imported."""

_library = torch.library.Library("treadle_kernels", "DEF")  # type: ignore[no-untyped-call]
_kernels: dict[str, list[Kernel]] = {}


class UnknownKernelError(LookupError):
    """A semantic op, or a kernel of one, that is not registered; names the nearest that is."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of one semantic op, with the targets and attributes it is good for."""

    op: str
    """the semantic op, whose call signature it shares"""
    name: str
    """unique: "linear.reference", "linear.cpp" """
    function: Callable[..., Any]
    """inline: a plain torch function; opaque: an OpOverload"""
    inline: bool
    supports: Predicate
    """asked with the target and the node's constant attributes, beside ``dtypes``: torch.dtype by argument name"""
    priority: int
    """the highest that is supported wins where nothing was measured; references have 0"""
    invariant: bool = False
    """a row's result depends on that row, and the history it may see, alone: what else is in the step, where the row
    stands in it and how prompts were cut changes no bit. Deterministic targets use no other kernels"""

    @property
    def is_reference(self) -> bool:
        """Whether this is the op's oracle."""
        return self.name == f"{self.op}.reference"


def always(target: Target, attrs: Mapping[str, Any]) -> bool:  # noqa: ARG001  (the predicate's signature)
    """Return True: the predicate of a kernel that runs everywhere."""
    return True


def if_deterministic(supports: Predicate) -> Predicate:
    """Return the predicate of a kernel that only deterministic targets have a use for."""

    def asked(target: Target, attrs: Mapping[str, Any]) -> bool:
        return target.deterministic and supports(target, attrs)

    return asked


def register(kernel: Kernel) -> None:
    """Add a kernel. Raises: ValueError if its name is taken, UnknownKernelError if there is no such op."""
    if kernel.op not in ops.SCHEMAS:
        raise UnknownKernelError(_no_such("semantic op", kernel.op, list(ops.SCHEMAS)))
    existing = _kernels.setdefault(kernel.op, [])
    if any(other.name == kernel.name for other in existing):
        raise ValueError(f"kernel {kernel.name} of op {kernel.op} is registered twice")
    existing.append(kernel)


def register_reference(op: str, function: Callable[..., Any], *, inline: bool, invariant: bool | None = None) -> None:
    """Make ``function`` the op's reference: what a direct call of the op runs, and its last candidate.

    An op whose reference cannot be traced (``inline`` False) stands in graphs as itself. One that can is ``invariant``
    once it is compiled, as long as no library multiplies matrices in it.
    """
    ops.implement(op, function)
    kernel = Kernel(
        op=op,
        name=f"{op}.reference",
        function=function if inline else ops.op(op),
        inline=inline,
        supports=always,
        priority=0,
        invariant=inline if invariant is None else invariant,
    )
    register(kernel)


@contextmanager
def registered(kernel: Kernel) -> Iterator[Kernel]:
    """Register a kernel for the length of a ``with`` block."""
    register(kernel)
    try:
        yield kernel
    finally:
        _kernels[kernel.op].remove(kernel)


def define_opaque(op: str, variant: str, function: Callable[..., Any], device: str) -> torch._ops.OpOverload:
    """Return a new operator ``treadle_kernels::{op}_{variant}`` that runs ``function`` on tensors of ``device``.

    It has the schema and the shape function of the semantic op, so graphs treat both alike.
    """
    name = f"{op}_{variant}"
    _library.define(name + ops.SCHEMAS[op])  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"treadle_kernels::{name}", ops.SHAPES[op], lib=_library)
    _library.impl(name, function, device.upper())  # type: ignore[no-untyped-call]
    return getattr(torch.ops.treadle_kernels, name).default  # type: ignore[no-any-return]


def load_all() -> None:
    """Import every op file, so that all kernels are registered, always in the same order."""
    for module in OP_MODULES:
        importlib.import_module(f"treadle.kernels.{module}")


def candidates(op: str, target: Target, attrs: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels of ``op`` that support the target and attributes: best first, the reference last.

    A deterministic target may have none. Raises: UnknownKernelError if the op has no kernel.
    """
    reference(op)
    usable = [kernel for kernel in _kernels[op] if kernel.is_reference or kernel.supports(target, attrs)]
    if target.deterministic:
        usable = [kernel for kernel in usable if kernel.invariant]
    return sorted(usable, key=lambda kernel: (kernel.is_reference, -kernel.priority, kernel.name))


def reference(op: str) -> Kernel:
    """Return the reference kernel of ``op``. Raises: UnknownKernelError."""
    return named(f"{op}.reference")


def named(name: str) -> Kernel:
    """Return the kernel called ``name``. Raises: UnknownKernelError, which names the nearest one."""
    load_all()
    everything = {kernel.name: kernel for kernels in _kernels.values() for kernel in kernels}
    if name not in everything:
        raise UnknownKernelError(_no_such("kernel", name, list(everything)))
    return everything[name]


def dtypes_of(target: Target, attrs: Mapping[str, Any], *names: str) -> set[torch.dtype]:
    """Return the dtypes of those named arguments that are tensors; the model's dtype where the node tells of none."""
    known = attrs.get("dtypes", {})
    return {known[name] for name in names if name in known} or {getattr(torch, target.dtype)}


def _no_such(kind: str, name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"no {kind} {name!r}; the nearest is {nearest[0]!r}" if nearest else f"no {kind} {name!r}"
