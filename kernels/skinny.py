"""Which targets the Triton kernels for a few tokens are for. For more tokens, the compiler fuses the references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from treadle.graph.buckets import SKINNY_TOKENS
from treadle.kernels.registry import Predicate, dtypes_of

if TYPE_CHECKING:
    from treadle.graph.target import Target

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What the kernels read and write; they add in float32."""


def is_skinny(target: Target) -> bool:
    """Return whether the program serves steps of a few tokens only."""
    return target.max_tokens is not None and target.max_tokens <= SKINNY_TOKENS


def skinny(*names: str) -> Predicate:
    """Return the predicate of a kernel for few tokens whose tensor arguments ``names`` must have one dtype."""

    def supports(target: Target, attrs: Mapping[str, Any]) -> bool:
        dtypes = dtypes_of(target, attrs, *names)
        return is_skinny(target) and len(dtypes) == 1 and dtypes <= DTYPES

    return supports


def launch_options(pdl: bool) -> dict[str, Any]:
    """Return what Triton is told beside a kernel's arguments; its interpreter knows no such options."""
    return {"launch_pdl": True} if pdl else {}
