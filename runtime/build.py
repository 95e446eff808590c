"""From a resolved deployment to a running engine: graph, passes, weights, arena. The one place where all parts meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from treadle.conf.lock import from_lock
from treadle.conf.phase import OnPhase
from treadle.conf.size import parse_bytes
from treadle.graph import ops
from treadle.graph.buckets import SKINNY_TOKENS, assign_buckets
from treadle.graph.build import BuildOptions, build
from treadle.graph.footprint import attention_tokens
from treadle.graph.ir import Graph
from treadle.graph.program import Executables, Lowering, Program
from treadle.graph.resolve import Resolved, resolve
from treadle.graph.state import State
from treadle.graph.target import Target
from treadle.graph.weights import WeightExpr
from treadle.kernels.backend import open_backend
from treadle.kernels.backend.protocol import Backend, Stream
from treadle.kernels.stopwatch import Stopwatch
from treadle.passes.base import Pass
from treadle.passes.pipeline import pipeline
from treadle.passes.runner import Watch, run_passes
from treadle.runtime.engine import Engine, EngineSettings
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.memory import arena_kinds
from treadle.runtime.state.tiers.build import open_tiers
from treadle.runtime.state.tiers.tiers import Tiers
from treadle.runtime.weights import load_weights

FLIGHT_BYTES = 256 << 20
"""State that is on its way out of the arena at a time, at most."""


def read_deployment(path: Path) -> Resolved:
    """Return the resolved deployment of a lock file."""
    return resolve(from_lock(path))


def model_graph(resolved: Resolved) -> Graph:
    """Return the MODEL-level graph of a deployment; nothing is read but headers."""
    deployment, plan = resolved.deployment, resolved.plan
    options = BuildOptions(dtype=deployment.model.dtype, max_len=plan.max_len, page_tokens=deployment.kv.page_tokens)
    return build(resolved.spec, resolved.checkpoint.weights, options)


def target(resolved: Resolved, max_tokens: int | None = None) -> Target:
    """Return what passes and kernels may ask about the hardware, for steps of at most ``max_tokens``."""
    deployment = resolved.deployment
    hardware = deployment.hardware
    return Target(
        device=hardware.device,
        features=frozenset(hardware.features or ()),
        threads=hardware.threads or 1,
        dtype=deployment.model.dtype,
        page_tokens=deployment.kv.page_tokens,
        kernels=deployment.passes.kernels,
        deterministic=deployment.passes.deterministic,
        max_tokens=max_tokens,
    )


def passes(
    resolved: Resolved,
    on_phase: OnPhase | None = None,
    max_tokens: int | None = None,
    stopwatch: Stopwatch | None = None,
) -> tuple[Pass, ...]:
    """Return the pipeline of a deployment; bodies compiled are reported as the phase ``compile``."""
    progress: Callable[[int, int], None] | None = None if on_phase is None else partial(on_phase, "compile")
    return pipeline(resolved.deployment.passes, target(resolved, max_tokens), progress, stopwatch)


def lower(
    resolved: Resolved,
    on_phase: OnPhase | None = None,
    watchers: Sequence[Watch] = (),
    max_tokens: int | None = None,
    stopwatch: Stopwatch | None = None,
) -> Graph:
    """Return the LOWERED graph of a deployment, for steps of at most ``max_tokens``."""
    return run_passes(passes(resolved, on_phase, max_tokens, stopwatch), model_graph(resolved), watchers)


def program(
    resolved: Resolved,
    backend: Backend | None,
    on_phase: OnPhase | None = None,
    watch: Callable[[int | None], Sequence[Watch]] = lambda _: (),
) -> Program:
    """Return how a deployment runs; where steps are captured, small ones have a lowering of their own.

    Without a ``backend`` the device is another machine's: nothing may be compiled or measured.

    ``watch`` gives those who watch the passes of a lowering, by the tokens of its largest step (None: any number).
    """
    config = resolved.deployment.passes
    captures, stopwatch = _captures(resolved, backend), None
    if captures and config.measure:
        assert backend is not None, "there is nothing to measure on"
        assert config.compile_cache is not None
        stopwatch = Stopwatch(backend, Path(config.compile_cache) / "timings.json")
    wide = Lowering(graph=lower(resolved, on_phase, watch(None), stopwatch=stopwatch))
    if not captures or not capturable(wide.graph):
        return Program(lowerings=(wide,))
    small = [
        Lowering(graph=lower(resolved, on_phase, watch(size), size, stopwatch), max_tokens=size)
        for size in lowering_sizes(resolved, backend)[1:]
    ]
    buckets = assign_buckets(resolved.plan.max_num_seqs, resolved.plan.max_step_tokens)
    return Program(lowerings=(*(each for each in small if capturable(each.graph)), wide), buckets=buckets)


def lowering_sizes(resolved: Resolved, backend: Backend | None) -> tuple[int | None, ...]:
    """Return the tokens of the largest step of each lowering that is made; None: any number.

    A deterministic program computes a row alike in small and large steps, so that there is but one.
    """
    small = _captures(resolved, backend) and not resolved.deployment.passes.deterministic
    return (None, SKINNY_TOKENS) if small else (None,)


def _captures(resolved: Resolved, backend: Backend | None) -> bool:
    return resolved.deployment.hardware.device == "cuda" if backend is None else backend.captures


def capturable(graph: Graph) -> bool:
    """Return whether no op stands as itself: a reference that cannot be traced looks at values on the host."""
    nodes = (node for body in graph.bodies.values() for node in body.ops)
    return all(getattr(node.target, "namespace", "") != ops.NAMESPACE.name for node in nodes)


def device(resolved: Resolved) -> Backend:
    """Return what a deployment runs on. Raises NoCudaError if that is not here."""
    hardware, config = resolved.deployment.hardware, resolved.deployment.passes
    cache = None if config.compile_cache is None else Path(config.compile_cache)
    return open_backend(hardware.device, threads=hardware.threads or 1, fixed=config.deterministic, cache=cache)


def weights(
    resolved: Resolved, expressions: Iterable[WeightExpr], on_phase: OnPhase | None = None
) -> Mapping[WeightExpr, Tensor]:
    """Return the loaded weights, fetched first if they are elsewhere; bytes are reported as the phase ``weights``."""
    resolved.source.fetch(on_phase)
    progress = None if on_phase is None else partial(on_phase, "weights")
    return load_weights(expressions, resolved.checkpoint, resolved.deployment.hardware.device, progress)


def _open_tiers(resolved: Resolved, backend: Backend, arena: Arena, state: State, stream: Stream) -> Tiers | None:
    """Return where state goes that leaves the arena; the same model in the same layout finds it again."""
    deployment = resolved.deployment
    model = f"{deployment.model.content} {deployment.model.seed} {deployment.passes.quantize}"
    return open_tiers(deployment.kv, backend, arena.bytes, stream, state=state, model=model)


def build_engine(resolved: Resolved, on_phase: OnPhase) -> Engine:
    """Return an engine that is ready to step.

    The phases reported are fetch (of weights that are elsewhere), graph, compile, weights, state and warm up.
    """
    deployment = resolved.deployment
    resolved.source.fetch(on_phase)
    on_phase("graph")
    backend = device(resolved)
    made = program(resolved, backend, on_phase)
    loaded = weights(resolved, made.weights, on_phase)
    on_phase("state")
    # What loading and compiling left behind goes back before the arena takes its part.
    backend.trim()
    arena = Arena(backend, resolved.plan.arena_bytes, arena_kinds(made.state), scratch_bytes=made.state.scratch_bytes)
    settings = EngineSettings(
        max_len=resolved.plan.max_len,
        max_num_seqs=resolved.plan.max_num_seqs,
        max_step_tokens=resolved.plan.max_step_tokens,
        chunk_tokens=deployment.scheduler.chunk_tokens or resolved.plan.max_step_tokens,
        attention_tokens=attention_tokens(resolved.spec, resolved.checkpoint.weights),
        # Over HTTP the text side bounds the queue; it may see a slot as free before the step loop does.
        max_queue=deployment.scheduler.max_queue + resolved.plan.max_num_seqs,
        overlap=bool(deployment.scheduler.overlap),
        prefix_cache=deployment.kv.prefix_cache,
        planned_bytes={kind.name: kind.planned_bytes for kind in resolved.plan.kinds},
        checkpoint_bytes=parse_bytes(deployment.kv.checkpoints),
        flight_bytes=min(FLIGHT_BYTES, int(deployment.kv.host_memory or 0) // 4),
        vocab=resolved.spec.vocab,
        processors=resolved.plan.processors,
        seed=deployment.scheduler.seed,
    )
    engine = Engine(
        executor=Executables(made, loaded, arena.bytes),
        backend=backend,
        arena=arena,
        state=made.state,
        settings=settings,
        buckets=made.buckets,
        tiers=partial(_open_tiers, resolved, backend, arena, made.state),
    )
    engine.warm_up(partial(on_phase, "warm up"), workspace_bytes=resolved.plan.workspace_bytes)
    return engine
