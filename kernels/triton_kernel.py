"""Registers Triton kernels of an op without importing Triton until one of them runs.

A kernel's module has a function with the op's name and signature, and ``pdl`` beside it: whether to launch by
programmatic dependent launch, as architectures from sm_90 on can.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from treadle.kernels.registry import Kernel, Predicate, define_opaque, register

if TYPE_CHECKING:
    from treadle.graph.target import Target

PRIORITY = 20


def register_triton(op: str, module: str, supports: Predicate, *, invariant: bool = False) -> None:
    """Register ``op`` of ``treadle.kernels.<module>`` for CUDA devices; nothing where Triton is not installed.

    ``supports`` is asked on such devices only. There are two kernels: "<op>.triton", and above it "<op>.triton_pdl".
    With ``invariant`` there are those of ``register_invariant_triton`` too: the function with ``invariant=True``.
    """
    _register(op, module, supports, fixed=False, options={})
    if invariant:
        _register(op, module, supports, fixed=True, options={"invariant": True})


def register_invariant_triton(op: str, module: str, supports: Predicate) -> None:
    """Register ``op`` of ``treadle.kernels.<module>`` for deterministic targets with a CUDA device.

    There are two kernels: "<op>.triton_invariant", and above it "<op>.triton_invariant_pdl".
    """
    _register(op, module, supports, fixed=True, options={})


def _register(op: str, module: str, supports: Predicate, *, fixed: bool, options: dict[str, bool]) -> None:
    if importlib.util.find_spec("triton") is None:
        return
    for pdl in (False, True):
        variant = "triton" + "_invariant" * fixed + "_pdl" * pdl
        kernel = Kernel(
            op=op,
            name=f"{op}.{variant}",
            function=define_opaque(op, variant, _lazy(op, module, {"pdl": pdl, **options}), "cuda"),
            inline=False,
            supports=functools.partial(_supports, supports, pdl, fixed),
            priority=PRIORITY + pdl,
            invariant=fixed,
        )
        register(kernel)


def _supports(supports: Predicate, pdl: bool, fixed: bool, target: Target, attrs: Mapping[str, Any]) -> bool:
    if target.device != "cuda" or target.deterministic != fixed or (pdl and "sm_90" not in target.features):
        return False
    return supports(target, attrs)


def _lazy(op: str, module: str, options: dict[str, bool]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"treadle.kernels.{module}"), op)
        return function

    def run(*args: Any) -> Any:
        return kernel()(*args, **options)

    return run
