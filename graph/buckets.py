"""The shapes of steps that are captured: a step is padded to the smallest one that holds it. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from treadle.graph.packet import StepShape

SKINNY_TOKENS = 8
"""Steps of at most as many tokens have a lowering of their own, with kernels that are bound by reading the weights."""

MAX_CAPTURED_TOKENS = 2048
"""Above, the work on the device hides what launching it costs the host, for all but the smallest models."""

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, *range(48, 256, 16))
MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
PREFILL_TOKENS = (640, 768, 896, 1024, 1280, 1536, 1792, MAX_CAPTURED_TOKENS)
"""Steps that are mostly chunks of prompts; closer together, since every padded token is computed."""


class Buckets:
    """Steps that only decode, one token a sequence, and mixed steps that hold chunks of prompts as well.

    A mixed bucket has fewer sequences than tokens: equal numbers mean one token each, and another kernel.
    """

    def __init__(self, decode: Sequence[StepShape] = (), mixed: Sequence[StepShape] = ()) -> None:
        self.decode = tuple(sorted(decode))
        self.mixed = tuple(sorted(mixed))
        self._decode_sizes = [shape.num_seqs for shape in self.decode]

    @property
    def all(self) -> tuple[StepShape, ...]:
        """Every bucket, the largest first: captured in this order, each fits the memory of the one before."""
        return tuple(sorted(self.decode + self.mixed, reverse=True))

    def find(self, shape: StepShape, *, decodes_only: bool) -> StepShape | None:
        """Return the smallest bucket that holds a step of ``shape``, None if it is too large for any."""
        if decodes_only:
            at = bisect_left(self._decode_sizes, shape.num_seqs)
            return self.decode[at] if at < len(self.decode) else None
        fitting = (b for b in self.mixed if b.num_tokens >= shape.num_tokens and b.num_seqs >= shape.num_seqs)
        return next(fitting, None)


def assign_buckets(max_num_seqs: int, max_step_tokens: int) -> Buckets:
    """Return the buckets of a deployment: any number of decodes fits one, and so do most small mixed steps."""
    sizes = {size for size in (*DECODE_SIZES, *range(256, max_num_seqs, 64)) if size < max_num_seqs} | {max_num_seqs}
    mixed = set[StepShape]()
    for tokens in (size for size in (*MIXED_TOKENS, *PREFILL_TOKENS) if size <= max_step_tokens):
        counts = (4, tokens // 2) if tokens in PREFILL_TOKENS else (4, max(4, tokens // 8), tokens // 2)
        for seqs in counts:
            capped = min(seqs, max_num_seqs)
            mixed.add(StepShape(tokens, capped, capped))
    return Buckets([StepShape(size, size, size) for size in sizes], list(mixed))


def largest_shape(launched: StepShape, buckets: Buckets) -> StepShape:
    """Return the largest of each size among the buckets and ``launched``, the largest step that is not captured."""
    tokens, seqs, rows = (max(sizes) for sizes in zip(launched, *buckets.all))
    return StepShape(tokens, seqs, rows)
