"""From logits to tokens. Each row's token depends on its own logits, parameters, seed and token index alone.

Order, as vLLM's: processors, what ``kernels.adjust_logits`` does, min_tokens (forbids what would end the answer),
temperature, min_p, top_k, top_p. A row keeps every token tied with the last one it keeps. The token is drawn by one
uniform number, a hash of the seed and the token index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.graph.workspace import LOGPROB_ROWS
from treadle.kernels.adjust_logits import Controls, adjust_logits
from treadle.kernels.sample import TokenKernels
from treadle.runtime.request import MAX_LOGPROBS, TokenLogprob
from treadle.runtime.sequence import Needs as Needs

FIRST_CANDIDATES = 256
"""likeliest tokens that are sorted for top_p at first; more only if they do not hold enough probability"""

ALIGNED = 4
"""numbers that a GPU reads at a time: rows of a multiple of as many all begin at the start of such a read"""

ROW_BLOCK = 8
"""rows drawn at a time, so that the temporaries of a large vocabulary stay in the cache"""

GREEDY, SAMPLED = Needs(), Needs(sampled=True, top_k=1 << 30, top_p=True, min_p=True, masked=True)
ADJUSTED = SAMPLED._replace(adjusted=True)
VARIANTS = (GREEDY, SAMPLED, ADJUSTED, ADJUSTED._replace(logprobs=MAX_LOGPROBS, asked=True))
"""What is captured, the cheapest first: each serves every step that needs no more."""


def variant(needs: Needs) -> int:
    """Return the index in VARIANTS of the cheapest one that serves a step with these needs."""
    if needs.logprobs is not None:
        return 3
    if needs.adjusted:
        return 2
    return 1 if needs.sampled or needs.masked else 0


class RowParams(NamedTuple):
    """Parameters of the rows of logits. Shapes: [R], stops [R, E]."""

    temperature: Tensor
    """float32, 0 = greedy"""
    top_k: Tensor
    """int64, 0 = all"""
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    """int64"""
    token_index: Tensor
    """int64, which generated token of its request this will be"""
    min_left: Tensor
    """int64, generated tokens still to come before one may end the answer"""
    stops: Tensor
    """int64, tokens that end the answer: the first repeated as padding, -1 where there is none"""

    def at(self, block: slice) -> RowParams:
        """Return those of some rows, as views."""
        return RowParams(*(column[block] for column in self))


class Scores(NamedTuple):
    """What R tokens score among all, by the model alone. Shapes: [R], tops and asked [R, n]."""

    logprobs: Tensor
    """float32, the token's, of the distribution as the model gave it"""
    ranks: Tensor
    """int64, 1 = most likely"""
    top_ids: Tensor
    top_logprobs: Tensor
    asked_logprobs: Tensor | None = None
    """float32, of the tokens that the row's request asked for"""

    def rows(self) -> list[TokenLogprob]:
        """Return each token's, with all that was found. At once, since every call for a few of them takes longer."""
        columns = [column.tolist() for column in self if column is not None]
        return [TokenLogprob(*row) for row in zip(*columns)]


class Samples(NamedTuple):
    """The outcome: tokens, and where log-probabilities are wanted what they score. Shapes: as ``Scores``."""

    tokens: Tensor
    """int64, -1 where the logits are not finite"""
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    asked_logprobs: Tensor | None = None
    scored: Scores | None = None
    """of tokens of prompts, where there are any"""

    @property
    def own(self) -> Scores | None:
        """What the tokens score, if that was wanted."""
        if self.logprobs is None or self.ranks is None or self.top_ids is None or self.top_logprobs is None:
            return None
        return Scores(self.logprobs, self.ranks, self.top_ids, self.top_logprobs, self.asked_logprobs)


class Changes(NamedTuple):
    """What changes the logits before a token is drawn."""

    slots: Tensor
    """[R] int64"""
    controls: Controls
    processed: Mapping[int, Callable[[Tensor], None]] = {}
    """by row: changes a row of float32 logits [V] in place"""

    def of(self, logits: Tensor, block: slice, kernels: TokenKernels | None) -> Tensor:
        """Return the changed logits of a block of rows, float32."""
        wanted = {
            row - block.start: change for row, change in self.processed.items() if block.start <= row < block.stop
        }
        part = logits[block]
        if wanted:
            part = part.to(torch.float32, copy=True)
            for row, change in wanted.items():
                change(part[row])
        adjust = adjust_logits if kernels is None else kernels.adjust_logits
        return adjust(part, self.slots[block], self.controls)


def sample(
    logits: Tensor,
    rows: RowParams | None,
    needs: Needs,
    kernels: TokenKernels | None = None,
    changes: Changes | None = None,
) -> Samples:
    """Return a token for each row of ``logits`` [R, V]; the logits stay as they are.

    ``rows`` may be None where nothing is drawn or masked, ``changes`` where nothing is adjusted or asked. ``kernels``
    draw the tokens; without them plain torch does.
    """
    assert rows is not None or not (needs.sampled or needs.masked)
    assert changes is not None or not (needs.adjusted or needs.asked)
    if changes is None or not needs.adjusted:
        tokens = _tokens(logits, rows, needs, kernels)
    else:
        # In float32 they take as much as the four copies that log-probabilities are made with; twice that where
        # processors change a copy first.
        blocks = _blocks(len(logits), (2 if changes.processed else 4) * LOGPROB_ROWS)
        parts = [
            _tokens(changes.of(logits, block, kernels), None if rows is None else rows.at(block), needs, kernels)
            for block in blocks
        ]
        tokens = torch.cat(parts)
    result = Samples(tokens)
    if needs.logprobs is None:
        return result
    asked = None
    if needs.asked and changes is not None:
        asked = changes.controls.asked.index_select(0, changes.slots).long()
    return result._replace(**score(logits, tokens.clamp_min(0), needs.logprobs, asked)._asdict())


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, max(count, 1), size)]


def _tokens(logits: Tensor, rows: RowParams | None, needs: Needs, kernels: TokenKernels | None) -> Tensor:
    if kernels is not None:
        plain = not (needs.sampled or needs.masked)
        return kernels.greedy(logits) if rows is None or plain else kernels.draw(logits, rows)
    if rows is not None and needs.masked:
        logits = _forbid_stops(logits, rows)
    best, tokens = logits.max(dim=-1)
    # A maximum carries NaN along, and is infinite where softmax would give NaN.
    valid = best.isfinite()
    if rows is not None and needs.sampled:
        blocks = [slice(first, first + ROW_BLOCK) for first in range(0, len(tokens), ROW_BLOCK)]
        drawn = torch.cat([_draw(logits[each], best[each], rows.at(each), needs) for each in blocks])
        tokens = torch.where(rows.temperature > 0, drawn, tokens)
    return torch.where(valid, tokens, -1)


def uniforms(seed: Tensor, index: Tensor) -> Tensor:
    """Return one number in [0, 1) for each pair, float64 [R]. Source: the finaliser of SplitMix64, applied twice."""
    mixed = _mix(_mix(seed) + index * _GOLDEN)
    # 52 bits, so that even the largest one times a sum, rounded, stays below the sum.
    return _shift_right(mixed, 12).double() * 2.0**-52


def _forbid_stops(logits: Tensor, rows: RowParams) -> Tensor:
    stops = rows.stops.clamp_min(0)
    banned = (rows.min_left > 0).unsqueeze(1) & (rows.stops >= 0)
    values = logits.gather(1, stops).masked_fill(banned, -torch.inf)
    return logits.scatter(1, stops, values)


def _draw(logits: Tensor, best: Tensor, rows: RowParams, needs: Needs) -> Tensor:
    # Greedy rows go along at temperature 1; their draw is not used.
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    # Below the best one, which stays at 0 however small the temperature is.
    scaled = (logits.float() - best.float().unsqueeze(1)).div_(temperature.unsqueeze(1))
    if needs.min_p:
        scaled = scaled.masked_fill(scaled < rows.min_p.log().unsqueeze(1), -torch.inf)
    if needs.top_k:
        scaled = scaled.masked_fill(scaled < _top_k_floor(scaled, rows.top_k, needs.top_k).unsqueeze(1), -torch.inf)
    probs = scaled.softmax(dim=-1)
    if needs.top_p:
        probs = probs.masked_fill(probs < _top_p_floor(probs, rows.top_p).unsqueeze(1), 0.0)
    return _search(probs, rows)


def _search(probs: Tensor, rows: RowParams) -> Tensor:
    """Return a token for each row by inverse transform in the order of the vocabulary."""
    # In float64: a sum of many small numbers decides.
    sums = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniforms(rows.seed, rows.token_index).unsqueeze(1) * sums[:, -1:]
    drawn = torch.searchsorted(sums, target, right=True).squeeze(1)
    # NaN rows search to the end; they are marked later, and must stay inside the vocabulary until then.
    return drawn.clamp_max(probs.shape[1] - 1)


def _top_k_floor(scaled: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Return the smallest value that each row keeps, [R]."""
    values = scaled.topk(min(largest, scaled.shape[1]), dim=-1).values
    last = values.gather(1, (top_k - 1).clamp(0, values.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(top_k > 0, last, -torch.inf)


def _top_p_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest probability that each row keeps, [R]: the likeliest tokens that together reach ``top_p``."""
    floor = torch.zeros_like(top_p)
    left = (top_p < 1).nonzero().squeeze(1)
    count = FIRST_CANDIDATES
    # Most rows are settled by the first round; a flat distribution takes more, and only its own row pays.
    while left.numel():
        count = min(count, probs.shape[1])
        values = probs[left].topk(count, dim=-1).values
        sums = values.cumsum(dim=-1, dtype=torch.float64)
        target = top_p[left].double().unsqueeze(1)
        settled = (sums[:, -1] >= target.squeeze(1)) | (count == probs.shape[1])
        at = torch.searchsorted(sums, target).clamp_max(count - 1)
        floor[left[settled]] = values.gather(1, at).squeeze(1)[settled]
        left, count = left[~settled], count * 16
    return floor


def score(logits: Tensor, tokens: Tensor, count: int, asked: Tensor | None = None) -> Scores:
    """Return what ``tokens`` [R] score in the distributions that ``logits`` [R, V] give.

    ``count`` likeliest tokens come with each; ``asked`` [R, n] are others whose log-probabilities are wanted.
    """
    parts = []
    for rows in _blocks(len(tokens), LOGPROB_ROWS):
        logprobs = _log_softmax(logits[rows].float())
        chosen = logprobs.gather(1, tokens[rows].unsqueeze(1))
        top = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
        columns = [chosen.squeeze(1), (logprobs > chosen).sum(dim=-1) + 1, top.indices, top.values]
        parts.append(columns if asked is None else [*columns, logprobs.gather(1, asked[rows])])
    return Scores(*(torch.cat(columns) for columns in zip(*parts)))


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities of fp32 logits [R, V]; on a GPU too the same bits for a row wherever it stands."""
    vocab = logits.shape[1]
    if spare := -vocab % ALIGNED:
        # The library adds a row up in an order that depends on where it begins in memory: let all begin alike.
        logits = F.pad(logits, (0, spare), value=-torch.inf)
    return logits.log_softmax(dim=-1)[:, :vocab]


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Return the logical shift; torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """Return 64 well-mixed bits for each of ``value``, int64 wrapping around."""
    value = value + _GOLDEN
    value = (value ^ _shift_right(value, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    value = (value ^ _shift_right(value, 27)) * (0x94D049BB133111EB - (1 << 64))
    return value ^ _shift_right(value, 31)
