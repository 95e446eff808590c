"""``treadle memory``: where every byte of the deployment goes, and what else would fit. Nothing is loaded.

With ``--url`` instead, where the bytes of state are in a server that runs: planned and actual, by kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from treadle.conf.size import format_bytes, parse_bytes
from treadle.graph.footprint import token_weight_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.conf.schema import Deployment
    from treadle.graph.memory import MemoryPlan
    from treadle.graph.resolve import Resolved
    from treadle.serve.running import Samples


def run(resolved: Resolved, console: Console) -> int:
    """Print the memory plan as two tables, what takes how much and what fits, and what is beside it. Returns 0."""
    deployment, plan = resolved.deployment, resolved.plan
    model, passes = deployment.model, deployment.passes
    weights = model.dtype if passes.quantize == "none" else f"{passes.quantize}, {model.dtype} activations"
    console.print(f"[bold]{escape(model.name)}[/] ({model.family}, {weights}) on {deployment.hardware.name}\n")
    console.print(_rows(plan))
    for row in plan.host:
        console.print(f"main memory, {row.item}: {format_bytes(row.nbytes)}")
    if (disk := deployment.kv.disk).path is not None:
        size = format_bytes(parse_bytes(disk.memory))
        console.print(f"disk, files of state in {escape(disk.path)}: {size} at most", soft_wrap=True)
    console.print(_limits(resolved))
    return 0


def ask(deployment: Deployment, console: Console, url: str) -> int:
    """Print where the bytes of state are in the server at ``url``, of which serve.api_key is the key. Returns 0.

    Raises: ConfigError if no server of treadle answers.
    """
    from treadle.serve.running import read_metrics

    samples = read_metrics(url, deployment.serve.api_key)
    console.print(f"[bold]{escape(samples.model)}[/] at {escape(url)}\n")
    console.print(_kinds(samples))
    console.print(_held(samples))
    return 0


def _kinds(samples: Samples) -> Table:
    table = Table(title="state, by kind", title_justify="left", show_footer=True)
    fields = {
        "planned": "planned",
        "used": "held by requests",
        "cached": "kept for later ones",
        "free": "free in its slabs",
        "available": "it could be given",
    }
    columns = {title: samples.by(f"treadle:state_{name}_bytes", "kind") for name, title in fields.items()}
    table.add_column("", footer="all")
    for title, column in columns.items():
        # Each could be given what others could: there is no sum.
        total = "" if title == fields["available"] else format_bytes(int(sum(column.values())))
        table.add_column(title, justify="right", footer=total)
    for kind in columns["planned"]:
        table.add_row(escape(kind), *(format_bytes(int(column.get(kind, 0))) for column in columns.values()))
    return table


def _held(samples: Samples) -> Table:
    table = Table(title="the arena, and what is below it", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def add(what: str, num_bytes: float) -> None:
        table.add_row(what, format_bytes(int(num_bytes)))

    add("arena", samples.value("treadle:arena_bytes"))
    add("slabs that no kind has", samples.value("treadle:arena_free_slab_bytes"))
    add("stranded: unused, and no request can be given it", samples.value("treadle:arena_stranded_bytes"))
    scattered = 100 * samples.value("treadle:arena_fragmentation")
    table.add_row("fragmentation: of the unused, what only moving others makes usable", f"{scattered:.1f} %")
    count = samples.value("treadle:checkpoints")
    add(f"checkpoints, {count:,.0f} of them", samples.value("treadle:checkpoint_bytes"))
    count = samples.value("treadle:sessions_pinned")
    add(f"pinned sessions, {count:,.0f} of them", samples.value("treadle:pinned_bytes"))
    if (pool := samples.value(samples.named("kv_offload_cpu_allocation_size"))) > 0:
        used = pool * samples.value(samples.named("kv_offload_cpu_cache_usage_perc"))
        table.add_row("host", f"{format_bytes(int(used))} of {format_bytes(int(pool))}")
    held = samples.by(samples.named("kv_offload_tiering_used_bytes"), "tier")
    for tier in samples.by(samples.named("kv_offload_tiering_up"), "tier"):
        table.add_row(escape(tier), format_bytes(int(held[tier])) if tier in held else "it does not say")
    return table


def _rows(plan: MemoryPlan) -> Table:
    table = Table(title="memory", title_justify="left", show_footer=True)
    table.add_column("", footer="all")
    table.add_column("what", footer=f"of {format_bytes(plan.memory_bytes)}")
    table.add_column("bytes", justify="right", footer=f"{plan.total_bytes:,}")
    table.add_column("", justify="right", footer=format_bytes(plan.total_bytes))
    table.add_column("share", justify="right", footer=f"{100 * plan.total_bytes / plan.memory_bytes:.1f} %")
    kind = None
    for row in plan.rows:
        if kind not in (None, row.kind):
            table.add_section()
        share = f"{100 * row.nbytes / plan.memory_bytes:.1f} %"
        table.add_row(
            "" if row.kind == kind else row.kind, row.item, f"{row.nbytes:,}", format_bytes(row.nbytes), share
        )
        kind = row.kind
    table.add_section()
    table.add_row("free", "", f"{plan.free_bytes:,}", format_bytes(plan.free_bytes), "")
    return table


def _limits(resolved: Resolved) -> Table:
    deployment, plan = resolved.deployment, resolved.plan
    token_bytes = plan.kv.page_bytes / plan.kv.page_tokens
    table = Table(title="what fits", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens of a sequence, model.max_len", f"{plan.max_len:,}")
    table.add_row("largest that model.max_len could be", f"{plan.largest_context:,}")
    table.add_row("sequences that run together, scheduler.max_num_seqs", f"{plan.max_num_seqs:,}")
    table.add_row(
        f"of them, full ones of {plan.max_len:,} tokens that the arena holds at once", f"{plan.full_sequences:,}"
    )
    table.add_row("the most full ones, if the arena took all that is free", f"{plan.largest_num_seqs:,}")
    alone = ", if it held nothing else" if plan.state.needs_checkpoints else ""
    table.add_row(f"tokens in the arena{alone}", f"{plan.num_pages * plan.kv.page_tokens:,}")
    table.add_row("bytes of a token's keys and values", f"{token_bytes:,.0f}")
    if plan.state.needs_checkpoints:
        table.add_row("bytes of a sequence beside them: windows and recurrent state", f"{plan.beside_bytes:,}")
        table.add_row("bytes that checkpoints may take, kv.checkpoints", f"{plan.checkpoint_bytes:,}")
    if deployment.hardware.bandwidth_gbps:
        bound = deployment.hardware.bandwidth_gbps * 1e9 / token_weight_bytes(resolved.spec, plan.rows)
        table.add_row("tokens/s of one sequence that the memory bandwidth allows", f"{bound:,.0f}")
    return table
