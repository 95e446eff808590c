"""What a layer keeps between steps, as data: the kinds of state, their page layout and their sizes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNIT_BYTES = 256
"""Page tables hold offsets in this unit, so that 32 bits address half a terabyte."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """Keys and values that one layer appends for every token.

    Shapes: K is [kv_heads, page_tokens, k_dim] in a page, V follows it as [kv_heads, page_tokens, v_dim].
    """

    kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, dtype: str) -> int:
        """Return the bytes that one token of this layer takes in a cache of ``dtype``."""
        return self.kv_heads * (self.k_dim + self.v_dim) * ITEM_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """One state kind: paged keys and values of all layers that keep them, in layer order.

    A page is contiguous and holds ``page_tokens`` tokens of every layer, [layer][k/v][head][token][dim], so that
    moving a page anywhere is one copy. Sizes in bytes; a page, and a layer's part of it, is a whole number of 256-byte
    units: copy engines want rows of keys at a multiple of their size.
    """

    name: str
    layers: tuple[LayerKV, ...]
    dtype: str
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return self.layer_offset(len(self.layers))

    @property
    def page_units(self) -> int:
        """Size of a page in units of 256 bytes, the step between two page handles."""
        return self.page_bytes // UNIT_BYTES

    def layer_offset(self, slot: int) -> int:
        """Return the byte offset of the ``slot``-th layer inside a page."""
        return sum(
            round_up(layer.bytes_per_token(self.dtype) * self.page_tokens, UNIT_BYTES) for layer in self.layers[:slot]
        )

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_tokens)
