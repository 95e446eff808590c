"""``treadle bench bench=RECIPE``: measure, write down, compare."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.conf.document import choices
from treadle.conf.errors import ConfigError
from treadle.conf.lock import to_plain
from treadle.conf.recipe import Recipe, Start, read_recipe
from treadle.runtime.garbage import Garbage
from treadle.runtime.progress import PhaseBars
from treadle.serve.bench import facts
from treadle.serve.bench.play import EnginePlayer, Player
from treadle.serve.bench.report import table, write
from treadle.serve.bench.results import OURS, Results, RowResult
from treadle.serve.bench.rivals import RivalError, RivalPlayer, plays
from treadle.serve.bench.start import measure_start
from treadle.serve.bench.trials import Rows, run_rows
from treadle.serve.bench.workload import check_fits, measure, needs

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved
    from treadle.kernels.backend.protocol import Backend


def run(resolved: Resolved, console: Console, output: str = ".") -> int:
    """Run the deployment's recipe, print a table and write a JSON file into the folder ``output``. Returns 0.

    Raises: ConfigError without a recipe, and for rows that the deployment cannot run.
    """
    from treadle.runtime.build import device

    deployment = resolved.deployment
    bench, scheduler = deployment.bench, deployment.scheduler
    recipe = read_recipe(bench.rows, bench.rivals)
    if not recipe.rows:
        names = [f"bench={name}" for name, _ in choices("bench")]
        raise ConfigError("no recipe is chosen", key="bench", nearest=names)
    check_fits(
        recipe.rows,
        max_len=resolved.plan.max_len,
        max_num_seqs=resolved.plan.max_num_seqs,
        max_queue=scheduler.max_queue,
    )
    started, machine = datetime.now(UTC), facts.machine(deployment.hardware)
    backend = device(resolved)
    ceilings = _ceilings(backend)
    found = _starts(resolved, recipe)
    with ExitStack() as stack:
        players, versions = _open(resolved, recipe, stack)
        ready_bytes = backend.memory().reserved_bytes
        found |= run_rows(
            _trials(recipe, players, resolved.spec.vocab),
            trials=bench.trials,
            warmup=bench.warmup,
            patience_s=bench.patience_s,
        )
        memory = facts.memory(resolved.plan, ready_bytes, backend.memory().reserved_bytes)
    results = Results(
        recipe=bench.name or "bench",
        started=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=facts.versions(),
        machine=machine,
        revision=facts.revision(),
        fingerprint=resolved.fingerprint,
        deployment=to_plain(deployment),
        ceilings=ceilings,
        memory=memory,
        rivals=versions,
        rows={name: found[name] for name in recipe.rows},
    )
    console.print(table(results))
    console.print(f"[dim]{write(results, Path(output))}[/]")
    return 0


def _ceilings(backend: Backend) -> dict[str, float]:
    from treadle.serve.bench.ceilings import measure_ceilings

    with PhaseBars() as bars:
        bars("ceilings")
        found = measure_ceilings(backend)
    backend.trim()
    return found


def _starts(resolved: Resolved, recipe: Recipe) -> dict[str, RowResult]:
    """Return the results of rows that start processes, while no other engine holds the device."""
    rows: Rows = {
        name: (row, {OURS: partial(measure_start, resolved, row)})
        for name, row in recipe.rows.items()
        if isinstance(row, Start)
    }
    bench = resolved.deployment.bench
    return run_rows(rows, trials=bench.trials, warmup=0, patience_s=bench.patience_s) if rows else {}


def _open(resolved: Resolved, recipe: Recipe, stack: ExitStack) -> tuple[dict[str, Player], dict[str, str]]:
    """Return the players that came up, and what each rival is or why it is not there."""
    from treadle.runtime.build import build_engine

    players: dict[str, Player] = {}
    versions: dict[str, str] = {}
    played = [row for row in recipe.rows.values() if not isinstance(row, Start)]
    sizes = [needs(row) for row in played if plays(row)]
    path, threads = resolved.source.path, resolved.deployment.hardware.threads or 1
    with PhaseBars() as bars:
        if played:
            engine = build_engine(resolved, bars)
            stack.callback(engine.close)
            # As in the server's process.
            garbage = stack.enter_context(Garbage())
            players[OURS] = EnginePlayer(engine, garbage, temperature=resolved.deployment.bench.temperature)
        for name, rival in recipe.rivals.items():
            if path is None or not sizes:
                versions[name] = "not run: it needs a checkpoint and a row for rivals"
                continue
            bars(name)
            batch, context = (max(size) for size in zip(*sizes))
            try:
                player = stack.enter_context(
                    RivalPlayer(rival, path.absolute(), threads=threads, batch=batch, context=context)
                )
            except RivalError as error:
                versions[name] = f"not run: {error}"
            else:
                players[name], versions[name] = player, player.version
    return players, versions


def _trials(recipe: Recipe, players: Mapping[str, Player], vocab: int) -> Rows:
    """Return the rows that are played, each with the engines that take part in it."""
    return {
        name: (
            row,
            {
                engine: partial(measure, row, player, vocab)
                for engine, player in players.items()
                if engine == OURS or plays(row)
            },
        )
        for name, row in recipe.rows.items()
        if not isinstance(row, Start)
    }
