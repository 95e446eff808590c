"""What a benchmark measures, as data: the workloads, the engines beside treadle, and what there is to compare with.

A figure's last part is its unit: ``tpot_ms``, ``cold_s``, ``output_tok_s``, ``recomputed_pct``. More is better for
rates, less for times and shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from treadle.conf.errors import ConfigError, nearest

T = TypeVar("T", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(gt=0)]


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one number of a row is held against."""

    target: Amount | None = None
    floor: Amount | None = None
    """the best that the hardware's ceilings allow"""
    baselines: dict[str, Amount] = {}
    """other engines' numbers, measured elsewhere and written down: name -> value"""


class RowBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="workload"):
    """What every row has. ``gives`` are the figures of a workload; ``figures`` those to show, all if it is empty."""

    figures: dict[str, Figure] = {}
    trials: Count | None = None
    """instead of the recipe's"""
    gives: ClassVar[tuple[str, ...]] = ()

    @property
    def shown(self) -> dict[str, Figure]:
        """The figures to show, in order."""
        return self.figures or {name: Figure() for name in self.gives}


class Decode(RowBase, tag="decode", frozen=True, kw_only=True):
    """``batch`` requests of ``context`` prompt tokens that decode together.

    ``tpot_ms``: a step while all of them do. ``output_tok_s``: tokens of all a second, in those steps.
    """

    batch: Count = 1
    context: Count
    output: Annotated[int, msgspec.Meta(ge=2)] = 128
    gives: ClassVar[tuple[str, ...]] = ("tpot_ms", "output_tok_s")


class Prefill(RowBase, tag="prefill", frozen=True, kw_only=True):
    """One request alone, from its arrival to its first token: ``ttft_ms``, and ``prompt_tok_s`` for the same."""

    prompt: Count
    gives: ClassVar[tuple[str, ...]] = ("ttft_ms", "prompt_tok_s")


class Throughput(RowBase, tag="throughput", frozen=True, kw_only=True):
    """Requests that all arrive at once: ``total_s`` to the last token, and ``output_tok_s`` over that time."""

    requests: Count
    prompt: Count
    output: Count
    gives: ClassVar[tuple[str, ...]] = ("output_tok_s", "total_s")


class SharedPrefix(RowBase, tag="shared_prefix", frozen=True, kw_only=True):
    """Requests that begin alike, all at once, seconds to the last token.

    ``cold_s``: with a beginning that is new. ``warm_s``: again with the same beginning and other ends.
    ``unshared_s``: as long, with nothing in common.
    """

    requests: Count
    shared: Count
    own: Count
    output: Count
    gives: ClassVar[tuple[str, ...]] = ("cold_s", "warm_s", "unshared_s")


class Arrivals(RowBase, tag="arrivals", frozen=True, kw_only=True):
    """Requests that arrive at random (Poisson), ``rate`` of them a second: percentiles over all requests, or tokens."""

    rate: Amount
    requests: Count
    prompt: Count
    output: Annotated[int, msgspec.Meta(ge=2)]
    gives: ClassVar[tuple[str, ...]] = tuple(
        f"{what}_p{share}_ms" for what in ("ttft", "tpot", "itl") for share in (50, 90, 99)
    )


class Sessions(RowBase, tag="sessions", frozen=True, kw_only=True):
    """Conversations of ``turns`` turns, ``parallel`` of them answered at once in random order, turn after turn.

    A turn's prompt is the whole conversation and ``user`` tokens more; a conversation begins with ``system`` tokens,
    the same for all. ``recomputed_pct``: tokens fed to the program for prompts that had been fed before, of all prompt
    tokens. ``first_ttft_p50_ms`` and ``ttft_p50_ms``, ``ttft_p99_ms``: of first turns, and of later ones.
    """

    sessions: Count
    turns: Annotated[int, msgspec.Meta(ge=2)]
    parallel: Count = 8
    system: Count
    user: Count
    output: Annotated[int, msgspec.Meta(ge=2)]
    gives: ClassVar[tuple[str, ...]] = ("recomputed_pct", "first_ttft_p50_ms", "ttft_p50_ms", "ttft_p99_ms", "total_s")

    @property
    def length(self) -> int:
        """Tokens of a conversation at its end."""
        return self.system + self.turns * (self.user + self.output)


class Returning(RowBase, tag="returning", frozen=True, kw_only=True):
    """A conversation of ``context`` tokens that comes back with ``user`` tokens more after others took its place.

    ``others`` prompts of as many tokens run in between. ``ttft_ms`` of the return, ``fresh_ttft_ms`` of the same prompt
    with another beginning, so that everything is computed, and ``recomputed_pct`` as for sessions.
    """

    context: Count
    user: Count = 64
    others: Count
    gives: ClassVar[tuple[str, ...]] = ("ttft_ms", "fresh_ttft_ms", "recomputed_pct")


class Start(RowBase, tag="start", frozen=True, kw_only=True):
    """A process of its own, from its start to its first token.

    ``cold_s``: with empty caches of compiled code. ``second_s``: once more, with what that left.
    """

    prompt: Count = 16
    gives: ClassVar[tuple[str, ...]] = ("cold_s", "second_s")


Row = Decode | Prefill | Throughput | SharedPrefix | Arrivals | Sessions | Returning | Start
WORKLOADS: dict[str, type[RowBase]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (Decode, Prefill, Throughput, SharedPrefix, Arrivals, Sessions, Returning, Start)
}


RIVALS = ("transformers", "xllamacpp", "node-llama-cpp")
"""engines that can be run beside treadle: a Python package, llama.cpp as one, and llama.cpp from npm"""


class Rival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another engine, run on the same checkpoint in the same run, if it is installed."""

    engine: str
    """one of RIVALS"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """of transformers; the others take the weights as the file has them"""
    folder: str = "."
    """where node finds node_modules"""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark: the rows in order, and the rivals by name."""

    rows: dict[str, Row]
    rivals: dict[str, Rival] = {}


def read_recipe(rows: Mapping[str, Any], rivals: Mapping[str, Any]) -> Recipe:
    """Return the recipe that plain values describe. Raises ConfigError naming the key and the nearest that works."""
    _refuse_unknown("bench.rows", "workload", rows, WORKLOADS)
    _refuse_unknown("bench.rivals", "engine", rivals, RIVALS)
    found = {name: _read_row(f"bench.rows.{name}", data) for name, data in rows.items()}
    others = {name: _read_rival(f"bench.rivals.{name}", data) for name, data in rivals.items()}
    return Recipe(rows=found, rivals=others)


def unit(figure: str) -> str:
    """Return the unit of a figure: ``ms``, ``s``, ``pct`` or ``tok/s``."""
    return "tok/s" if higher_is_better(figure) else figure.rpartition("_")[2]


def higher_is_better(figure: str) -> bool:
    """Whether more of a figure is better: of rates, not of times."""
    return figure.endswith("_tok_s")


def _refuse_unknown(key: str, kind: str, entries: Mapping[str, Any], kinds: Iterable[str]) -> None:
    """Raise ConfigError for an entry that does not say its ``kind``: most often another's name is meant."""
    for name, data in entries.items():
        if not isinstance(data, Mapping) or kind not in data:
            others = [other for other, data in entries.items() if isinstance(data, Mapping) and kind in data]
            close = [f"{key}.{other}" for other in nearest(name, others)]
            there = f"there are {', '.join(others)}; " if others and not close else ""
            hint = f"{there}a new one needs {key}.{name}.{kind}: {', '.join(kinds)}"
            raise ConfigError("nothing is called so", key=f"{key}.{name}", nearest=close, hint=hint)


def _read_row(key: str, data: Any) -> Row:
    workload = data.get("workload") if isinstance(data, Mapping) else None
    kind = WORKLOADS.get(str(workload))
    if kind is None:
        close = [f"workload: {name}" for name in nearest(str(workload), WORKLOADS)]
        raise ConfigError(
            "no such workload",
            key=f"{key}.workload",
            value=workload,
            nearest=close,
            hint=f"workloads: {', '.join(WORKLOADS)}",
        )
    figures = data.get("figures")
    if isinstance(figures, Mapping):
        for name, figure in figures.items():
            _convert(f"{key}.figures.{name}", figure, Figure)
    row = _convert(key, data, kind)
    for name in row.figures:
        if name not in kind.gives:
            hint = f"{workload} gives {', '.join(kind.gives)}"
            raise ConfigError(
                "no such figure", key=f"{key}.figures.{name}", nearest=nearest(name, kind.gives), hint=hint
            )
    assert isinstance(row, Row)
    return row


def _read_rival(key: str, data: Any) -> Rival:
    rival = _convert(key, data, Rival)
    if rival.engine not in RIVALS:
        close = [f"engine: {name}" for name in nearest(rival.engine, RIVALS)]
        hint = f"engines: {', '.join(RIVALS)}"
        raise ConfigError("cannot be run beside", key=f"{key}.engine", value=rival.engine, nearest=close, hint=hint)
    return rival


def _convert(key: str, data: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        name = re.search(r"field `([^`]*)`", text)
        if name is None:
            raise ConfigError(text, key=key + path.rstrip("`")) from None
        full = f"{key}{path.rstrip('`')}.{name[1]}"
        if "unknown" not in text:
            raise ConfigError("has no value", key=full, hint="the workload needs it") from None
        fields = [field.name for field in msgspec.structs.fields(kind)]
        raise ConfigError(
            "no such key", key=full, nearest=nearest(name[1], fields), hint=f"known: {', '.join(fields)}"
        ) from None
