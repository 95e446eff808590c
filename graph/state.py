"""What layers keep between steps, as data: the kinds of state, their layout and their sizes. No torch here.

What grows with every token lives in pages, what has a fixed size in blocks. Layers whose tokens live equally long share
a *group* of pages; all fixed-size states of a model share the one block that each sequence has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNIT_BYTES = 256
"""Tables hold offsets in this unit, so that 32 bits address half a terabyte."""

BLOCK = -1
"""The group of a slot that lies in the sequence's block."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """What one layer appends for every token: keys and values, a latent, or side keys.

    Shapes: K is [kv_heads, page_tokens, k_dim] in a page, V follows it as [kv_heads, page_tokens, v_dim]. A latent, and
    side keys, are keys of one head without values.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    kind: str = "kv"
    """kv, latent or index"""

    def bytes_per_token(self, dtype: str) -> int:
        """Return the bytes that one token of this layer takes in a cache of ``dtype``."""
        return self.kv_heads * (self.k_dim + self.v_dim) * ITEM_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """One group: what all layers append whose tokens live equally long, in layer order.

    A page is contiguous and holds ``page_tokens`` tokens of every layer, [layer][k/v][head][token][dim], so that
    moving a page anywhere is one copy. Sizes in bytes; a page, and a layer's part of it, is a whole number of 256-byte
    units: copy engines want rows of keys at a multiple of their size. A group without layers has pages of one unit, so
    that tokens are counted in pages whatever the model keeps of them.
    """

    name: str
    layers: tuple[LayerKV, ...]
    dtype: str
    page_tokens: int
    window: int = 0
    """a query sees tokens at distance < window; 0: all"""
    chunk: int = 0
    """a query sees tokens of its own span of so many positions; 0: all"""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return max(self.layer_offset(len(self.layers)), UNIT_BYTES)

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

    def most_pages(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most pages that a sequence has at once until it has ``num_tokens``.

        Where layers see part of the tokens: those that the first of ``step_tokens`` sees, to those of the last.
        """
        reach = min((each for each in (self.window, self.chunk) if each), default=num_tokens)
        return min(self.pages_for(num_tokens), self.pages_for(reach + min(step_tokens, num_tokens)) + 1)

    def first_needed(self, position: int) -> int:
        """Return the earliest position that a query at ``position`` sees; no later query sees an earlier one."""
        by_window = position - self.window + 1 if self.window else 0
        by_chunk = position // self.chunk * self.chunk if self.chunk else 0
        return max(by_window, by_chunk, 0)


@dataclass(frozen=True, kw_only=True)
class BlockPart:
    """A state of fixed size that one layer keeps of each sequence."""

    kind: str
    """conv, delta, ssm, shift, ..."""
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the part, a whole number of 256-byte units."""
        return round_up(math.prod(self.shape) * ITEM_BYTES[self.dtype], UNIT_BYTES)


@dataclass(frozen=True, kw_only=True)
class Block:
    """All fixed-size states of one sequence, one after the other; contiguous, so that copying it is one copy."""

    parts: tuple[BlockPart, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.offset(len(self.parts))

    @property
    def block_units(self) -> int:
        """Size of a block in units of 256 bytes."""
        return self.block_bytes // UNIT_BYTES

    def offset(self, index: int) -> int:
        """Return the byte offset of the ``index``-th part inside a block."""
        return sum(part.nbytes for part in self.parts[:index])


@dataclass(frozen=True, order=True)
class Slot:
    """Where one state of one layer lies: which group, or BLOCK, and which of its layers or parts."""

    group: int
    index: int


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that a model keeps between steps. The first group holds what is never out of sight."""

    groups: tuple[PagedKV, ...]
    block: Block | None = None

    @property
    def full(self) -> PagedKV:
        """The group of layers that see all tokens; it may have none."""
        return self.groups[0]

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of any group."""
        return self.full.page_tokens

    @property
    def needs_checkpoints(self) -> bool:
        """Whether going on behind some tokens takes more than the first group's pages of them."""
        return len(self.groups) > 1 or self.block is not None

    @property
    def num_slots(self) -> int:
        """States of all layers."""
        return sum(len(group.layers) for group in self.groups) + (len(self.block.parts) if self.block else 0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that hold any one page or block."""
        sizes = [group.page_bytes for group in self.groups]
        return max(sizes if self.block is None else [*sizes, self.block.block_bytes])

    def offset(self, slot: Slot) -> int:
        """Return where a state lies inside its page or block, in bytes."""
        if slot.group != BLOCK:
            return self.groups[slot.group].layer_offset(slot.index)
        assert self.block is not None
        return self.block.offset(slot.index)


@dataclass
class StateBuilder:
    """Collects the states of a model's layers, in layer order, and says where each will lie."""

    dtype: str
    page_tokens: int
    _groups: dict[tuple[int, int], list[LayerKV]] = field(default_factory=lambda: {(0, 0): []})
    _parts: list[BlockPart] = field(default_factory=list)

    def append(self, layer: LayerKV, window: int = 0, chunk: int = 0) -> Slot:
        """Return the slot of what a layer appends for every token and reads as far as ``window`` and ``chunk`` say."""
        key = (window, chunk)
        layers = self._groups.setdefault(key, [])
        layers.append(layer)
        return Slot(list(self._groups).index(key), len(layers) - 1)

    def keep(self, part: BlockPart) -> Slot:
        """Return the slot of a state of fixed size."""
        self._parts.append(part)
        return Slot(BLOCK, len(self._parts) - 1)

    def state(self) -> State:
        """Return what was collected."""
        groups = tuple(
            PagedKV(
                name=_group_name(*key), layers=tuple(layers), dtype=self.dtype, page_tokens=self.page_tokens,
                window=key[0], chunk=key[1],
            )
            for key, layers in self._groups.items()
        )  # fmt: skip
        return State(groups=groups, block=Block(parts=tuple(self._parts)) if self._parts else None)


def _group_name(window: int, chunk: int) -> str:
    names = [f"window {window}"] if window else []
    return ", ".join([*names, f"chunk {chunk}"] if chunk else names) or "kv"
