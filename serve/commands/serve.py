"""``treadle serve``: answer over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.conf.lock import fingerprint, to_lock
from treadle.runtime.llm import limits_of
from treadle.runtime.text.load import load_tokenizer
from treadle.serve.engine_process import worker_command
from treadle.serve.ready import cache_info, summary
from treadle.serve.server import Plan, serve

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved


def run(resolved: Resolved, console: Console) -> int:
    """Serve until a signal ends it. Returns the exit code.

    Raises: ConfigError if the tokenizer cannot be read or the port cannot be had.
    """
    return serve(serving_plan(resolved), console)


def serving_plan(resolved: Resolved) -> Plan:
    """Return what the HTTP process needs to know of a deployment. Raises TokenizerError."""
    deployment = resolved.deployment
    # Here, not beside the engine: a model without one is refused before anything starts.
    tokenizer = load_tokenizer(resolved.source, resolved.deployment.model.sampling)
    return Plan(
        config=deployment.serve,
        name=deployment.serve.served_name or deployment.model.name,
        fingerprint=fingerprint(deployment),
        limits=limits_of(resolved),
        capacity=resolved.plan.max_num_seqs + deployment.scheduler.max_queue,
        load_tokenizer=lambda: tokenizer,
        command=worker_command,
        deployment=to_lock(deployment).encode(),
        summary=summary(resolved),
        cache_info=cache_info(resolved),
    )
