"""What draws tokens on a device where nothing may come back to the host. The reference is ``runtime.sampler``."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from torch import Tensor

from treadle.kernels.adjust_logits import Controls


class Rows(Protocol):
    """Sampling parameters of R rows of logits, [R] each but for ``stops``."""

    @property
    def temperature(self) -> Tensor:
        """float32, 0 = greedy"""

    @property
    def top_k(self) -> Tensor:
        """int64, 0 = all"""

    @property
    def top_p(self) -> Tensor:
        """float32, 1 = all"""

    @property
    def min_p(self) -> Tensor:
        """float32, 0 = all"""

    @property
    def seed(self) -> Tensor:
        """int64"""

    @property
    def token_index(self) -> Tensor:
        """int64"""

    @property
    def min_left(self) -> Tensor:
        """int64, tokens until a stop token may be drawn"""

    @property
    def stops(self) -> Tensor:
        """int64 [R, E], -1 where there is none"""


class TokenKernels(Protocol):
    """Draws a token for each row of logits [R, V]; -1 where they are not finite. The logits stay as they are."""

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the first largest of each row, [R] int64."""

    def draw(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return tokens by the parameters of each row, [R] int64."""

    def adjust_logits(self, logits: Tensor, slots: Tensor, controls: Controls) -> Tensor:
        """Do as ``kernels.adjust_logits.adjust_logits`` does."""

    def note_tokens(self, tokens: Tensor, slots: Tensor, controls: Controls) -> None:
        """Do as ``kernels.adjust_logits.note_tokens`` does."""


def token_kernels(device: str) -> TokenKernels | None:
    """Return what draws tokens on ``device``, None where plain torch does."""
    if device != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from treadle.kernels import sample_triton

    return sample_triton
