"""Help: the commands, the groups with their choices, and the keys that people set most."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from treadle.conf.document import choices
from treadle.conf.override import PRESET
from treadle.conf.schema import GROUPS
from treadle.serve.arguments import COMMON
from treadle.serve.commands import COMMANDS, Command, Option

_USEFUL = (
    ("model=hf model.path=DIR", "any Hugging Face-layout directory or .gguf file"),
    ("model.max_len=4096", "tokens of a sequence, prompt and answer"),
    ("model.dtype=float32", "auto, float32, bfloat16 or float16"),
    ("kv.memory=2GiB", "bytes for keys and values"),
    ("scheduler.max_num_seqs=8", "sequences that run together"),
    ("passes.compile=false", "start sooner, run slower"),
    ("passes=reference", "plain torch: the oracle"),
    ("serve.port=8080", "where to listen; serve.host=0.0.0.0 opens it to the network"),
    ("serve.api_key=KEY", "key that clients must send"),
)

_HYDRA = (
    ("--cfg job", "print the composed configuration (--resolve, --package GROUP)"),
    ("--info defaults", "how it was composed (all, config, defaults-tree, searchpath, plugins)"),
    ("-m KEY=A,B", "run once for each value"),
    ("-sc install=bash", 'completion: eval "$(treadle -sc install=bash)"; zsh and fish too'),
)


def print_help(console: Console, command: Command | None = None) -> None:
    """Print the help of one command, or of all."""
    if command is None:
        console.print("[bold]treadle[/] COMMAND \\[group=choice ...] \\[group.key=value ...]\n")
        _print_rows(console, "commands", [(one.name, one.summary) for one in COMMANDS] + [("version", "which treadle")])
    else:
        words = f" {command.words.upper()}" if command.words else ""
        console.print(f"[bold]treadle {command.name}[/]{words} \\[group=choice ...] \\[group.key=value ...]")
        console.print(f"{command.summary}\n")
        if command.example:
            _print_rows(console, "example", [(command.example, "")])
    options = (*(command.options if command else ()), *COMMON)
    _print_rows(console, "options", [(_spell(option), option.summary) for option in options])
    if command is not None:
        served = [row for row in _USEFUL if command.name == "serve" or not row[0].startswith("serve.")]
        _print_rows(console, "keys", served)
        console.print("[dim]Groups, sweeps and completion: treadle --help. All keys: docs/configuration.md[/]")
        return
    _print_rows(
        console, "groups", [(group, ", ".join(name for name, _ in choices(group))) for group in (*GROUPS, PRESET)]
    )
    _print_rows(console, "keys", list(_USEFUL))
    _print_rows(console, "as in any Hydra application", list(_HYDRA))
    console.print("[dim]All keys: docs/configuration.md, or treadle --cfg job[/]")


def _spell(option: Option) -> str:
    flag = f"--{option.name.replace('_', '-')}"
    return flag if option.kind is bool else f"{flag} {option.name.split('_')[-1].upper()}"


def _print_rows(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/]")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for left, right in rows:
        table.add_row(f"  {left.replace('[', chr(92) + '[')}", right)
    console.print(table)
    console.print()
