"""Proves a pass numerically: the graph before and after it give the same results on sampled inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.graph.ir import Graph
from treadle.graph.program import Executable
from treadle.graph.weights import WeightExpr
from treadle.kernels import registry
from treadle.passes.base import Pass
from treadle.passes.runner import PassStep
from treadle.passes.sample import Sample, distinct_calls, draw

LoadWeights = Callable[[Iterable[WeightExpr]], Mapping[WeightExpr, Tensor]]

ROUNDING = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest relative distance of a row of results that another order of operations explains."""


class ProofError(AssertionError):
    """A pass changes results by more than rounding and its own tolerance explain."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a proof measured."""

    applied: Pass
    error: float
    """largest distance of a row of logits, relative to its length"""
    allowed: float


def row_error(exact: Tensor, other: Tensor) -> float:
    """Return the largest relative distance ||a - b|| / ||a|| over the rows; infinite where ``other`` is not finite."""
    a, b = exact.float().flatten(1), other.float().flatten(1)
    if not torch.isfinite(b).all():
        return float("inf")
    return float(((a - b).norm(dim=1) / a.norm(dim=1).clamp_min(1e-12)).max())


def allowed(applied: Pass, graph: Graph) -> float:
    """Return the distance that rounding in the graph's dtype and the pass's own loss explain."""
    return ROUNDING[graph.dtype] + applied.tolerance


class Prover:
    """Watches a pipeline and proves every step. Bodies are run once each, on the weights of their first call."""

    def __init__(self, load: LoadWeights, vocab: int, seed: int = 0) -> None:
        self._load, self._vocab, self._seed = load, vocab, seed
        self._sample: Sample | None = None
        self.proofs: list[Proof] = []

    def __call__(self, step: PassStep) -> None:
        """Prove one step. Raises: ProofError naming the pass, the distance and what was allowed."""
        if self._sample is None:
            self._sample = draw(step.before, self._vocab, self._seed)
        exact, got = (evaluate(graph, self._load, self._sample) for graph in (step.before, step.after))
        proof = Proof(applied=step.applied, error=row_error(exact, got), allowed=allowed(step.applied, step.after))
        self.proofs.append(proof)
        if not proof.error <= proof.allowed:
            raise ProofError(
                f"pass {step.number}, {step.applied!r}, moves the logits by {proof.error:.2e} of their size;"
                f" rounding and its tolerance explain {proof.allowed:.2e}"
            )


def evaluate(graph: Graph, load: LoadWeights, sample: Sample) -> Tensor:
    """Return the logits of the small model that has each body once, on ``sample``."""
    registry.load_all()
    small = distinct_calls(graph)
    return Executable(small, load(small.weights), sample.memory(small)).forward(sample.inputs)
