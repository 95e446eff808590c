"""Results for people: a table of treadle beside other engines, target and floor; and for programs: a JSON file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from treadle.conf.errors import ConfigError
from treadle.conf.size import format_bytes
from treadle.serve.bench.results import OURS, FigureResult, Results


def write(results: Results, folder: Path) -> Path:
    """Return the new JSON file, named by recipe and time. Raises ConfigError if it cannot be written."""
    stem = f"{results.recipe}-{results.started.replace(':', '')}"
    text = msgspec.json.format(msgspec.json.encode(results)) + b"\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = len(list(folder.glob(f"{stem}*.json")))
        path = folder / (f"{stem}-{taken + 1}.json" if taken else f"{stem}.json")
        path.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--output", value=folder) from None
    return path


def table(results: Results) -> Table:
    """Return a row for each figure. A factor is how many times better treadle is; a rival's is of the same run."""
    others = list(
        dict.fromkeys(
            name
            for row in results.rows.values()
            for figure in row.figures.values()
            for name in (*figure.engines, *figure.baselines)
            if name != OURS
        )
    )
    made = Table(title=_title(results), title_justify="left", caption_justify="left", caption=_caption(results))
    for column in ("row", "figure"):
        made.add_column(column, no_wrap=True)
    for column in (OURS, "min .. max", *others, "target", "floor"):
        made.add_column(column, justify="right")
    for name, row in results.rows.items():
        for label, figure in row.figures.items():
            made.add_row(name, label, *_cells(figure, others))
    return made


def _cells(figure: FigureResult, others: list[str]) -> list[str | Text]:
    ours = figure.engines[OURS]
    cells: list[str | Text] = [Text(_number(ours.median), style="bold"), f"{_number(ours.min)} .. {_number(ours.max)}"]
    for name in others:
        measured = figure.engines.get(name)
        cells.append(_against(figure, measured.median if measured else figure.baselines.get(name)))
    return [*cells, _against(figure, figure.target), _against(figure, figure.floor)]


def _against(figure: FigureResult, other: float | None) -> str | Text:
    if other is None:
        return ""
    ratio = figure.ratio(other)
    if math.isinf(ratio):
        return Text(_number(other), style="green")
    return Text.assemble(f"{_number(other)} ", (f"{ratio:.2f}x", "green" if ratio >= 1 else "red"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _title(results: Results) -> str:
    machine = results.machine
    where = f"{machine['name']}, {machine['threads']} threads" if machine["device"] == "cpu" else machine["name"]
    return f"{results.recipe}: {results.deployment['model']['name']} on {where}"


def _caption(results: Results) -> str:
    ceilings = ", ".join(f"{name} {value:.3g}" for name, value in results.ceilings.items())
    disturbed = sum(row.disturbed for row in results.rows.values())
    lines = [f"trials disturbed by other processes: {disturbed}"] if disturbed else []
    lines += [f"ceilings of the same run: {ceilings}", *(f"{name}: {what}" for name, what in results.rivals.items())]
    if results.memory:
        planned, ready, end = (results.memory[f"{name}_bytes"] for name in ("planned", "ready", "end"))
        lines.append(
            f"memory: {format_bytes(planned)} planned, {format_bytes(ready)} reserved once ready"
            f" ({ready / planned - 1:+.1%}), {format_bytes(end)} at the end"
        )
    return "\n".join(lines)
