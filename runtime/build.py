"""From a resolved deployment to a running engine: graph, passes, weights, arena. The one place where all parts meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from treadle.conf.lock import from_lock
from treadle.conf.phase import OnPhase
from treadle.graph.build import BuildOptions, build
from treadle.graph.ir import Graph
from treadle.graph.program import Executable
from treadle.graph.resolve import Resolved, resolve
from treadle.graph.target import Target
from treadle.graph.weights import WeightExpr
from treadle.kernels.backend import open_backend
from treadle.passes.base import Pass
from treadle.passes.pipeline import pipeline
from treadle.passes.runner import Watch, run_passes
from treadle.runtime.engine import Engine, EngineSettings
from treadle.runtime.state.arena import Arena
from treadle.runtime.weights import load_weights


def read_deployment(path: Path) -> Resolved:
    """Return the resolved deployment of a lock file."""
    return resolve(from_lock(path))


def model_graph(resolved: Resolved) -> Graph:
    """Return the MODEL-level graph of a deployment; nothing is read but headers."""
    deployment, plan = resolved.deployment, resolved.plan
    options = BuildOptions(dtype=deployment.model.dtype, max_len=plan.max_len, page_tokens=deployment.kv.page_tokens)
    return build(resolved.spec, resolved.checkpoint.weights, options)


def target(resolved: Resolved) -> Target:
    """Return what passes and kernels may ask about the hardware."""
    deployment = resolved.deployment
    hardware = deployment.hardware
    return Target(
        device=hardware.device,
        features=frozenset(hardware.features or ()),
        threads=hardware.threads or 1,
        dtype=deployment.model.dtype,
        page_tokens=deployment.kv.page_tokens,
        kernels=deployment.passes.kernels,
    )


def passes(resolved: Resolved, on_phase: OnPhase | None = None) -> tuple[Pass, ...]:
    """Return the pipeline of a deployment; bodies compiled are reported as the phase ``compile``."""
    progress: Callable[[int, int], None] | None = None if on_phase is None else partial(on_phase, "compile")
    return pipeline(resolved.deployment.passes, target(resolved), progress)


def lower(resolved: Resolved, on_phase: OnPhase | None = None, watchers: Sequence[Watch] = ()) -> Graph:
    """Return the LOWERED graph of a deployment."""
    return run_passes(passes(resolved, on_phase), model_graph(resolved), watchers)


def weights(
    resolved: Resolved, expressions: Iterable[WeightExpr], on_phase: OnPhase | None = None
) -> Mapping[WeightExpr, Tensor]:
    """Return the loaded weights; bytes done are reported as the phase ``weights``."""
    progress = None if on_phase is None else partial(on_phase, "weights")
    return load_weights(expressions, resolved.checkpoint, resolved.deployment.hardware.device, progress)


def build_engine(resolved: Resolved, on_phase: OnPhase) -> Engine:
    """Return an engine that is ready to step. The phases reported are graph, compile, weights, state and warm up."""
    deployment = resolved.deployment
    on_phase("graph")
    backend = open_backend(deployment.hardware.device, threads=deployment.hardware.threads or 1)
    graph = lower(resolved, on_phase)
    loaded = weights(resolved, graph.weights, on_phase)
    on_phase("state")
    arena = Arena(backend, resolved.plan.arena_bytes, scratch_bytes=graph.state.page_bytes)
    settings = EngineSettings(
        max_len=resolved.plan.max_len,
        max_num_seqs=deployment.scheduler.max_num_seqs,
        max_step_tokens=deployment.scheduler.max_step_tokens,
        # Over HTTP the text side bounds the queue; it may see a slot as free before the step loop does.
        max_queue=deployment.scheduler.max_queue + deployment.scheduler.max_num_seqs,
        overlap=deployment.scheduler.overlap,
        prefix_cache=deployment.kv.prefix_cache,
    )
    executable = Executable(graph, loaded, arena.bytes)
    engine = Engine(executor=executable, backend=backend, arena=arena, kv=graph.state, settings=settings)
    on_phase("warm up")
    engine.warm_up()
    return engine
