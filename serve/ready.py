"""What a server says once when it is ready: where it answers, what it runs, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from treadle.conf.connector import read_connectors
from treadle.conf.size import format_bytes, parse_bytes

if TYPE_CHECKING:
    from treadle.conf.schema import KVConfig
    from treadle.graph.resolve import Resolved

Row = tuple[str, str]


def summary(resolved: Resolved) -> tuple[Row, ...]:
    """Return the rows about a deployment: model, device, limits, cache and memory by kind."""
    deployment, plan = resolved.deployment, resolved.plan
    model, hardware, passes = deployment.model, deployment.hardware, deployment.passes
    weights = model.dtype if passes.quantize == "none" else f"{passes.quantize} weights, {model.dtype} activations"
    threads = f", {hardware.threads} threads" if hardware.device == "cpu" else ""
    prefixes = "kept" if deployment.kv.prefix_cache else "not kept"
    tokens = plan.num_pages * plan.kv.page_tokens
    kinds: dict[str, int] = {}
    for row in plan.rows:
        kinds[row.kind] = kinds.get(row.kind, 0) + row.nbytes
    whole = f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.memory_bytes)}"
    return (
        ("model", f"{model.name} ({model.family}), {weights}"),
        ("device", f"{hardware.device}: {hardware.name}{threads}"),
        ("context", f"{plan.max_len:,} tokens of a sequence"),
        ("at once", f"{plan.max_num_seqs:,} sequences, {plan.full_sequences:,} of them as long as the context"),
        ("queue", f"{deployment.scheduler.max_queue:,} requests"),
        (
            "kv cache",
            f"{tokens:,} tokens in {plan.num_pages:,} pages of {plan.kv.page_tokens}; prefixes are {prefixes}",
        ),
        ("state", _state(resolved)),
        ("tiers", _tiers(deployment.kv)),
        ("memory", "\n".join(f"{kind}: {format_bytes(nbytes)}" for kind, nbytes in kinds.items())),
        ("in all", whole),
        ("key", "clients need serve.api_key" if deployment.serve.api_key else "none: whoever reaches the port may ask"),
    )


def _state(resolved: Resolved) -> str:
    """Return what sequences hold by kind of state, and where one can go on from."""
    state, policy = resolved.plan.state, resolved.deployment.kv
    kinds = [f"{group.name}: pages of {format_bytes(group.page_bytes)}" for group in state.groups]
    if state.block is not None:
        kinds.append(f"block: {format_bytes(state.block.block_bytes)} a sequence")
    if state.needs_checkpoints and policy.prefix_cache:
        kinds.append("prompts go on from checkpoints")
    return "\n".join(kinds)


def _tiers(kv: KVConfig) -> str:
    """Return where state goes that leaves the device."""
    tiers = [] if kv.host_memory is None else [f"{format_bytes(parse_bytes(kv.host_memory))} of main memory"]
    if kv.disk.path is not None:
        tiers.append(f"disk {kv.disk.path}, {format_bytes(parse_bytes(kv.disk.memory))}")
    tiers += [each.name for each in read_connectors(kv.connectors)]
    return "\n".join(tiers) or "nothing; kv.host_memory keeps state there"


def cache_info(resolved: Resolved) -> dict[str, str]:
    """Return the labels of the metric cache_config_info, under the names that vLLM has for them."""
    deployment, plan = resolved.deployment, resolved.plan
    return {
        "block_size": str(plan.kv.page_tokens),
        "num_gpu_blocks": str(plan.num_pages),
        "cache_dtype": plan.kv.dtype,
        "enable_prefix_caching": str(deployment.kv.prefix_cache),
    }


def ready_table(endpoint: str, rows: Sequence[Row]) -> Table:
    """Return the table; it reads the same without colours."""
    table = Table(title="ready", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("endpoint", endpoint)
    for name, text in rows:
        table.add_row(name, text)
    return table
