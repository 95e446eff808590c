"""The nodes of the prefix tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.runtime.state.snapshots import Snapshot

TOKEN_TYPE = "i"
TOKEN_BYTES = array(TOKEN_TYPE).itemsize


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A run of pages after the parent's. ``locks``: sequences that use this node or one below it."""

    key: bytes
    pages: list[int]
    parent: Node | None
    start: int = 0
    """pages from the root to its first"""
    children: dict[bytes, Node] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    """those at its end and in the page behind it"""
    locks: int = 0
    used: int = 0
    """tick of the last use; a parent's is never older than its children's"""
    answer: int = 0
    """tokens of the prompt of the answer that ends here; 0: none does"""
    digests: list[bytes] | None = None
    """of the tokens up to the end of each page, once somebody asked; a root has one, of no tokens"""

    @property
    def end(self) -> int:
        """Pages from the root to its end."""
        return self.start + len(self.pages)

    @property
    def root(self) -> Node:
        """The root above it, which has no parent."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def path(self) -> Iterator[Node]:
        """Yield it and those above it, the root excepted."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """Yield it and those below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def common_tokens(self, key: bytes, tokens: array[int], page_tokens: int) -> int:
        """Return with how many tokens of the page behind it both a child's ``key`` and ``tokens`` begin."""
        rest = tokens[self.end * page_tokens : (self.end + 1) * page_tokens]
        head = array(TOKEN_TYPE)
        head.frombytes(key[: page_tokens * TOKEN_BYTES])
        return next((index for index, (a, b) in enumerate(zip(head, rest)) if a != b), min(len(head), len(rest)))


@dataclass(slots=True)
class Match:
    """How much of a sequence's beginning the tree knows."""

    node: Node
    """where the usable pages end; to be locked"""
    pages: list[int]
    """full pages that can be used"""
    position: int
    """tokens that need not be computed again"""
    snapshot: Snapshot | None
    """what goes with them, if it takes more than the pages"""
    known: int
    """tokens whose pages are there, usable or not"""
    deepest: Node
    """where those pages end"""
    later: int = 0
    """tokens that the next step will be able to use, if they are more"""
