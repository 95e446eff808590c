"""The captured steps of a bucket: a graph of the program, and one of the sampling for each variant of it.

They are launched back to back. All share one pool of memory: what a bucket leaves behind, its logits above all, is
overwritten by the next step, whatever its bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from treadle.graph.packet import StepShape
from treadle.kernels.backend.protocol import Backend, Replay
from treadle.runtime.sampler import VARIANTS
from treadle.runtime.sequence import Needs

Forward = Callable[[StepShape], Tensor]
"""Runs the program on the packet that is on the device and returns logits."""

Finish = Callable[[Tensor, StepShape, Needs], None]
"""Samples from logits into the buffers that go to the host."""


@dataclass(frozen=True)
class CapturedStep:
    """The graphs of one bucket."""

    forward: Replay
    logits: Tensor
    """what ``forward`` gives, valid until the next step"""
    samples: tuple[Replay, ...]
    """in the order of VARIANTS"""

    def replay(self, variant: int) -> None:
        """Launch the two graphs of a step."""
        self.forward()
        self.samples[variant]()


def capture_step(backend: Backend, shape: StepShape, forward: Forward, finish: Finish) -> CapturedStep:
    """Record a bucket. Kernels are compiled by running the step first, on the padding that the device holds."""
    logits = forward(shape)
    for needs in VARIANTS:
        finish(logits, shape, needs)
    replay, logits = backend.capture(partial(forward, shape))
    samples = [backend.capture(partial(finish, logits, shape, needs))[0] for needs in VARIANTS]
    return CapturedStep(forward=replay, logits=logits, samples=tuple(samples))
