"""Why tokens of prompts were computed although somebody might have known them: every miss has a reason."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from treadle.runtime.sequence import Sequence
from treadle.runtime.state.digest import chain
from treadle.runtime.state.node import TOKEN_BYTES, Match, Node
from treadle.runtime.state.prefix import PrefixTree
from treadle.runtime.state.snapshots import Snapshot

REASONS = ("cold", "evicted", "below_granularity", "salt", "opted_out", "failed")
"""never seen; given up for other state; behind the last whole page or checkpoint; under another salt only; the cache is
off, or log-probabilities of the prompt are wanted; a tier did not give it"""
MOST_GHOSTS = 1 << 16


class Misses:
    """Counts tokens by reason; remembers the names of what was evicted, the oldest forgotten."""

    def __init__(self, tree: PrefixTree, page_tokens: int, *, needs_snapshots: bool = False) -> None:
        self._tree, self._page_tokens, self._needs_snapshots = tree, page_tokens, needs_snapshots
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self.tokens = dict.fromkeys(REASONS, 0)

    def note_pages(self, node: Node, keep: int) -> None:
        """Remember that all but the first ``keep`` pages of a node are evicted."""
        for digest in self._tree.digests(node)[keep:]:
            self._note(digest)

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """Remember that a snapshot is evicted."""
        if snapshot.node is not None:
            self._note(self._tree.digests(snapshot.node)[-1] + b"+")

    def add(self, reasons: dict[str, int]) -> None:
        """Count tokens by reason."""
        for reason, count in reasons.items():
            self.tokens[reason] += count

    def explain(self, sequence: Sequence, match: Match, enabled: bool) -> dict[str, int]:
        """Return of the tokens of a prompt that are not known how many are so for which reason."""
        tokens, size, reached = sequence.tokens, self._page_tokens, match.position
        end = sequence.prompt_len
        if not enabled or len(sequence.readable) < len(tokens):
            return {"opted_out": end - reached}
        failed = min(sequence.wait.failed, end - reached)
        reached += failed
        usable, seen = self._evicted(tokens, match)
        evicted = max(usable - reached, 0)
        reached += evicted
        below = max(seen - reached, 0)
        reached += below
        reasons = {"failed": failed, "evicted": evicted, "below_granularity": below}
        # Less than a page is not found again, so whether it was seen makes no difference.
        too_short = reached > 0 and end - reached < size
        at_end = reached == match.known and end - reached <= size
        if too_short or (at_end and self._is_known(match.deepest, tokens[reached:end])):
            return reasons | {"below_granularity": below + end - reached}
        if reached == 0:
            reached = reasons["salt"] = self._tree.known_elsewhere(tokens[:end].tobytes(), match.deepest) * size
        return reasons | {"cold": end - reached}

    def _evicted(self, tokens: array[int], match: Match) -> tuple[int, int]:
        """Return up to where tokens could be used if nothing had been evicted, and up to where they were seen."""
        size, tree = self._page_tokens, self._tree
        last = tree.digests(match.deepest)[-1]
        found = 0
        for node in match.deepest.path():
            if node.end * size <= match.position:
                break
            if tree.digests(node)[-1] + b"+" in self._ghosts:
                found = node.end * size
                break
        behind = tokens[match.known : len(tokens) // size * size].tobytes()
        step, seen = size * TOKEN_BYTES, match.known
        for page in range(len(behind) // step):
            (last,) = chain(last, behind[page * step : (page + 1) * step], step)
            if last not in self._ghosts:
                break
            seen = match.known + (page + 1) * size
            # Pages are of no use to a model that needs a snapshot where there was none, nor is one at the end.
            if not self._needs_snapshots or (last + b"+" in self._ghosts and seen < len(tokens)):
                found = seen
        return found, seen

    @staticmethod
    def _is_known(node: Node, rest: array[int]) -> bool:
        """Whether the tree goes on with these tokens, of a page at most."""
        data = rest.tobytes()
        heads = [*node.children, *(snapshot.tail for snapshot in node.snapshots)]
        return any(each.startswith(data) for each in heads)

    def _note(self, name: bytes) -> None:
        self._ghosts[name] = None
        if len(self._ghosts) > MOST_GHOSTS:
            self._ghosts.popitem(last=False)
