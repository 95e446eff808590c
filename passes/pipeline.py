"""The pipeline, on one page. Configuration names the order and what is left out; here each name gets its pass.

1 quantize   2 fuse projections   3 place state in the arena   4 fuse: rope + cache write (with the norms of
heads where a kernel does both), activation, add + norm; in programs for few tokens also product + residual add,
norm + product + activation   5 choose kernels   6 compile
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.conf.schema import PassesConfig
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.skinny import is_skinny
from treadle.kernels.stopwatch import Stopwatch
from treadle.passes.base import Pass
from treadle.passes.choose_kernels import ChooseKernels
from treadle.passes.compile import Compile
from treadle.passes.fuse_activation import FuseActivation
from treadle.passes.fuse_add_norm import FuseAddNorm
from treadle.passes.fuse_linear_add import FuseLinearAdd
from treadle.passes.fuse_norm_gated import FuseNormGated
from treadle.passes.fuse_norm_rope import FuseNormRope
from treadle.passes.fuse_projections import FuseProjections
from treadle.passes.fuse_rope_cache import FuseRopeCache
from treadle.passes.place_state import PlaceState
from treadle.passes.quantize import Quantize


def pipeline(
    config: PassesConfig,
    target: Target,
    progress: Callable[[int, int], None] | None = None,
    stopwatch: Stopwatch | None = None,
) -> tuple[Pass, ...]:
    """Return the passes of a deployment in order, those that are switched off left out.

    ``progress`` is told of bodies compiled; ``stopwatch`` measures kernels where there is a choice. The order is one
    that the configuration's check let pass.
    """
    makers: dict[str, Callable[[], Pass | None]] = {
        "quantize": lambda: Quantize(experts=target.device == "cpu") if config.quantize == "int8" else None,
        "fuse_projections": lambda: FuseProjections() if config.fuse_projections else None,
        "place_state": PlaceState,
        "fuse_rope_cache": lambda: FuseRopeCache() if config.fuse_rope_cache else None,
        "fuse_norm_rope": lambda: _fuse_norm_rope(config, target),
        "fuse_activation": lambda: FuseActivation() if config.fuse_activation else None,
        "fuse_linear_add": lambda: FuseLinearAdd() if config.fuse_linear_add and is_skinny(target) else None,
        "fuse_norm_gated": lambda: FuseNormGated() if config.fuse_norm_gated and is_skinny(target) else None,
        "fuse_add_norm": lambda: FuseAddNorm() if config.fuse_add_norm else None,
        "choose_kernels": lambda: ChooseKernels(target=target, stopwatch=stopwatch),
        "compile": lambda: _compile(config, target, progress) if config.compile else None,
    }
    return tuple(made for name in config.order if (made := makers[name]()) is not None)


def _fuse_norm_rope(config: PassesConfig, target: Target) -> FuseNormRope | None:
    """Return the pass where the target has more than the reference for the op that it makes."""
    registry.load_all()
    found = registry.candidates(FuseNormRope.makes, target, {})
    pays = bool(found) and not found[0].is_reference
    return FuseNormRope() if config.fuse_norm_rope and pays else None


def _compile(config: PassesConfig, target: Target, progress: Callable[[int, int], None] | None) -> Compile:
    cache = config.compile_cache or str(Path.home() / ".cache" / "treadle" / "compiled")
    return Compile(target=target, cache=cache, progress=progress)
