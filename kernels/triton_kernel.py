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


def register_triton(op: str, module: str, supports: Predicate) -> None:
    """Register ``op`` of ``treadle.kernels.<module>`` for CUDA devices; nothing where Triton is not installed.

    ``supports`` is asked on such devices only. There are two kernels: "<op>.triton", and above it "<op>.triton_pdl".
    """
    if importlib.util.find_spec("triton") is None:
        return
    for variant, pdl in (("triton", False), ("triton_pdl", True)):
        kernel = Kernel(
            op=op,
            name=f"{op}.{variant}",
            function=define_opaque(op, variant, _lazy(op, module, pdl), "cuda"),
            inline=False,
            supports=functools.partial(_supports, supports, pdl),
            priority=PRIORITY + pdl,
        )
        register(kernel)


def _supports(supports: Predicate, pdl: bool, target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cuda" and (not pdl or "sm_90" in target.features) and supports(target, attrs)


def _lazy(op: str, module: str, pdl: bool) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"treadle.kernels.{module}"), op)
        return function

    def run(*args: Any) -> Any:
        return kernel()(*args, pdl=pdl)

    return run
