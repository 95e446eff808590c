"""The results of a benchmark as data, for JSON files and tables."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from treadle.conf.recipe import Figure, Row, higher_is_better, unit

OURS = "treadle"


class Measured(msgspec.Struct, frozen=True):
    """One figure of one engine: its trials in order, and what sums them up."""

    median: float
    min: float
    max: float
    trials: list[float]

    @classmethod
    def of(cls, trials: list[float]) -> Measured:
        """Return the summary of ``trials``."""
        return cls(statistics.median(trials), min(trials), max(trials), trials)


class FigureResult(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a row: every engine's, and what they are held against."""

    unit: str
    higher_is_better: bool
    engines: dict[str, Measured]
    baselines: dict[str, float]
    target: float | None
    floor: float | None

    @classmethod
    def of(cls, name: str, figure: Figure, trials: dict[str, list[dict[str, float]]]) -> FigureResult:
        """Return the result of a figure; ``trials`` are the figures of each engine's trials."""
        return cls(
            unit=unit(name),
            higher_is_better=higher_is_better(name),
            engines={engine: Measured.of([trial[name] for trial in found]) for engine, found in trials.items()},
            baselines=figure.baselines,
            target=figure.target,
            floor=figure.floor,
        )

    def ratio(self, other: float) -> float:
        """Return how many times better treadle is than ``other``."""
        ours = self.engines[OURS].median
        if not ours:
            return 0.0 if self.higher_is_better else math.inf
        return ours / other if self.higher_is_better else other / ours


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what was played, and its figures by name."""

    row: Row
    figures: dict[str, FigureResult]
    disturbed: int = 0
    """trials, of all engines, that count although other processes took much of the machine"""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All of one run."""

    recipe: str
    started: str
    """UTC"""
    versions: dict[str, str | None]
    machine: dict[str, Any]
    revision: str | None
    """of git; ``+`` behind it: with changes"""
    fingerprint: str
    deployment: dict[str, Any]
    ceilings: dict[str, float]
    memory: dict[str, int]
    """planned, and reserved once ready and at the end; {} where the system provides it tensor by tensor"""
    rivals: dict[str, str]
    """name -> version, or why it did not run"""
    rows: dict[str, RowResult]
