"""latent_write: store this step's latent rows, or side keys, into the pages of their sequences.

A token at position p of sequence s lives in page j = p // page_tokens, row i = p % page_tokens, at byte

    page_table[s, j] * 256 + layer_offset + i * D * item

which is where ``cache_write`` puts the keys of a single head. Rows at position -1 write nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle.kernels import native
from treadle.kernels.cache_write import cache_write, cache_write_cpp
from treadle.kernels.registry import Kernel, define_opaque, register, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def latent_write(
    k: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
) -> None:
    """Write ``k`` into the arena.

    Shapes: k [T, D], of the cache's dtype; arena bytes [N] uint8; page_table [B, M] int32; seq_ids [T] int32;
    positions [T] int64; layer_offset one int64 (bytes inside a page).
    """
    keys = k.unsqueeze(1)
    cache_write(keys, keys[..., :0], arena, page_table, seq_ids, positions, layer_offset, page_tokens)


def latent_write_cpp(
    k: Tensor,
    arena: Tensor,
    page_table: Tensor,
    seq_ids: Tensor,
    positions: Tensor,
    layer_offset: Tensor,
    page_tokens: int,
) -> None:
    """Write ``k`` into the arena by the C++ kernel of ``cache_write``. Shapes: as ``latent_write``."""
    keys = k.unsqueeze(1)
    cache_write_cpp(keys, keys[..., :0], arena, page_table, seq_ids, positions, layer_offset, page_tokens)


def _on_cpu(target: Target, attrs: Mapping[str, Any]) -> bool:  # noqa: ARG001  (the predicate's signature)
    return target.device == "cpu" and native.usable("cache_write")


def _always(target: Target, attrs: Mapping[str, Any]) -> bool:  # noqa: ARG001  (the predicate's signature)
    return True


register_reference("latent_write", latent_write, inline=False)
register(
    Kernel(
        op="latent_write",
        name="latent_write.cpp",
        function=define_opaque("latent_write", "cpp", latent_write_cpp, "cpu"),
        inline=False,
        supports=_on_cpu,
        priority=10,
        invariant=True,
    )
)
register_triton("latent_write", "latent_write_triton", _always, invariant=True)
