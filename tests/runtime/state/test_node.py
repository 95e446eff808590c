from __future__ import annotations

from array import array

from treadle.runtime.state.node import TOKEN_TYPE, Node


def key(*tokens: int) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def test_paths_and_what_lies_below() -> None:
    root = Node(b"", [], None)
    upper = Node(key(1, 2), [5], root)
    lower = Node(key(3, 4, 5, 6), [6, 7], upper, start=1)
    root.children[key(1, 2)], upper.children[key(3, 4)] = upper, lower
    assert [*lower.path()] == [lower, upper]
    assert [*root.below()] == [root, upper, lower]
    assert (lower.root, root.root, lower.end) == (root, root, 3)


def test_common_tokens_of_the_page_behind() -> None:
    root = Node(b"", [], None)
    long, other = key(1, 2, 3, 4, 5, 6, 7, 8), key(1, 9, 9, 9)
    assert root.common_tokens(long, array(TOKEN_TYPE, [1, 2, 3, 7]), 4) == 3
    assert root.common_tokens(long, array(TOKEN_TYPE, [1, 2, 3, 4, 5]), 4) == 4
    assert root.common_tokens(other, array(TOKEN_TYPE, [1, 9]), 4) == 2
    assert root.common_tokens(other, array(TOKEN_TYPE, [5]), 4) == 0
    assert root.common_tokens(other, array(TOKEN_TYPE), 4) == 0
    lower = Node(key(0, 0, 0, 0), [0], root)
    assert lower.common_tokens(other, array(TOKEN_TYPE, [0, 0, 0, 0, 1, 8]), 4) == 1
