"""What the C++ and the Triton kernels of ops with a block state take of their common arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treadle.graph.state import UNIT_BYTES
from treadle.kernels import native

TAIL_TYPES = (*([native.POINTER, native.LONG]), *([native.POINTER] * 5), native.LONG, native.INT)


def entry(name: str, *types: type) -> Callable[..., None]:
    """Return ``treadle_<name>`` of ``name``.cpp: it takes ``types``, then what ``tail`` returns."""
    return native.function(name, f"treadle_{name}", (*types, *TAIL_TYPES))


def tail(
    memory: Tensor, blocks: Tensor, offset: Tensor, q_starts: Tensor, positions: Tensor, kv_lens: Tensor
) -> tuple[Any, ...]:
    """Return these arguments of an op as C++ takes them."""
    assert blocks.dtype is q_starts.dtype is kv_lens.dtype is torch.int32
    assert positions.dtype is offset.dtype is torch.int64
    assert UNIT_BYTES == 256
    return (
        memory.data_ptr(),
        memory.stride(0) if memory.dim() == 2 else 0,
        blocks.data_ptr(),
        offset.data_ptr(),
        q_starts.data_ptr(),
        positions.data_ptr(),
        kv_lens.data_ptr(),
        kv_lens.shape[0],
        torch.get_num_threads(),
    )


def rows_dense(x: Tensor) -> Tensor:
    """Return ``x`` [T, ...], copied only if the elements of a row are not contiguous (rows may be a slice)."""
    dense = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if size != 1 and stride != dense:
            return x.contiguous()
        dense *= size
    return x


def whole(x: Tensor | None) -> Tensor | None:
    """Return a parameter as contiguous fp32."""
    return None if x is None else x.float().contiguous()


def pointer(x: Tensor | None) -> int | None:
    """Return where an optional tensor begins."""
    return None if x is None else x.data_ptr()
