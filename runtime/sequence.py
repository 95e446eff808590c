"""One request as the step loop sees it: its tokens, and how far they are computed."""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from treadle.graph.packet import Control
from treadle.runtime.processors import RowProcessors
from treadle.runtime.request import FinishReason, Request, RequestError, SamplingParams, TokenLogprob
from treadle.runtime.state.node import TOKEN_TYPE, Node
from treadle.runtime.state.tiers.ticket import Ticket


class Needs(NamedTuple):
    """What the rows of a step need, known to the host: the cheapest variant that serves them all is run."""

    sampled: bool = False
    """a temperature above 0"""
    top_k: int = 0
    """the largest top_k, 0 if no row has one"""
    top_p: bool = False
    min_p: bool = False
    masked: bool = False
    """a row must not end yet"""
    adjusted: bool = False
    """a row's logits are changed: penalties, biases, forbidden tokens, bad words, processors"""
    logprobs: int | None = None
    """the largest number of alternatives wanted, None if no row wants any log-probability"""
    asked: bool = False
    """a row wants log-probabilities of tokens by their ids"""


def controls_of(params: SamplingParams, bad_token_ids: tuple[tuple[int, ...], ...]) -> Control:
    """Return which arrays of its slot a request has its logits changed by."""
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    forbidden = params.allowed_token_ids is not None or any(len(word) == 1 for word in bad_token_ids)
    words = any(len(word) > 1 for word in bad_token_ids)
    found = Control(0)
    for control, wanted in ((Control.PENALTIES, penalties), (Control.FORBIDDEN, forbidden), (Control.WORDS, words)):
        found |= control if wanted else Control(0)
    return found


def needs_alone(params: SamplingParams, stop_ids: tuple[int, ...], controls: Control) -> Needs:
    """Return what a request's rows need at most."""
    hot = params.temperature > 0
    return Needs(
        sampled=hot,
        top_k=max(params.top_k, 0) if hot else 0,
        top_p=hot and params.top_p < 1,
        min_p=hot and params.min_p > 0,
        masked=bool(stop_ids) and params.min_tokens > 0,
        adjusted=bool(controls or params.logit_bias or params.logits_processors),
        logprobs=(params.logprobs or 0) if params.wants_logprobs else None,
        asked=params.logprob_token_ids is not None,
    )


def tokens_of(prompt: list[int], vocab: int) -> array[int]:
    """Return the ids of a prompt. Raises RequestError if there is none, or one outside [0, vocab)."""
    if not prompt:
        raise RequestError("the prompt is empty; it takes at least 1 token", "prompt")
    with contextlib.suppress(OverflowError):
        tokens = array(TOKEN_TYPE, prompt)
        # Python takes a millisecond to look through a long one.
        least, most = torch.frombuffer(tokens, dtype=torch.int32).aminmax()
        if least >= 0 and most < vocab:
            return tokens
    raise RequestError(f"the prompt holds a token id outside [0, {vocab})", "prompt")


@dataclass(slots=True)
class Window:
    """The pages of one group that a sequence's next token and those behind it see."""

    first: int
    """which page of the sequence the first one is"""
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Which page of the sequence would come next."""
        return self.first + len(self.pages)


class Sequence:
    """A request's tokens and what it holds: a slot, pages, a lock on the prefix tree.

    Steps are launched before the tokens of the step before are known, so it counts twice: ``tokens`` are known,
    ``computed`` and ``pending`` include steps in flight. The scheduler alone changes what it holds.
    """

    def __init__(
        self, request: Request, *, order: int, max_tokens: int, seed: int, arrival_s: float,
        prompt: array[int] | None = None,
    ) -> None:  # fmt: skip
        """``prompt``: the request's, if somebody has it as an array already."""
        self.id = request.id
        self.params = request.params
        self.order = order
        """of arrival: the smallest is the oldest"""
        self.arrival_s = arrival_s
        self.seed = seed
        self.max_tokens = max_tokens
        eos = () if request.params.ignore_eos else request.eos_ids
        self.eos_ids = frozenset(eos)
        self.stop_ids = tuple(dict.fromkeys((*eos, *request.params.stop_token_ids)))
        """every token that ends it"""
        self.bad_token_ids = request.bad_token_ids
        self.controls = controls_of(request.params, request.bad_token_ids)
        self.needs = needs_alone(request.params, self.stop_ids, self.controls)
        self.group, self.choice = request.group, request.choice
        self.cache_salt, self.boundaries = request.cache_salt, request.boundaries
        self.processors: RowProcessors | None = None
        """what it changes its logits by, in Python"""
        self.prompt_logprobs: list[TokenLogprob] = []
        """of the prompt's tokens from the second on, as far as they are known"""
        self.prompt_from = 0
        """the first position whose log-probability is still to be computed since it was admitted"""
        self.tokens = array(TOKEN_TYPE, request.prompt) if prompt is None else prompt
        """the prompt and every generated token known so far"""
        self.prompt_len = len(request.prompt)

        self.slot: int | None = None
        self.pages: list[int] = []
        """handles of pages of the first group of states, from its first token on"""
        self.room = 0
        """tokens that fit into its pages"""
        self.windows: list[Window] = []
        """those of every other group"""
        self.block: int | None = None
        """handle of its block of fixed-size states"""
        self.block_offset = 0
        """where that begins, in units of 256 bytes"""
        self.stops: list[int] = []
        """positions where chunks of its prompt end, because a checkpoint is wanted there, descending"""
        self.asked = False
        """tiers have been asked for its state since it began to wait"""
        self.joined: Sequence | None = None
        """whose state, on its way from tiers, it waits for, since it begins with the same"""
        self.looked = False
        """and already when it stood further back in the queue"""
        self.ahead: tuple[int, Ticket] | None = None
        """tokens that were found then, and their way to host memory"""
        self.left = 0
        """tokens that were computed when it was preempted last"""
        self.restored: dict[str, int] = {}
        """tokens that tiers brought back for it since it began to wait, by tier"""
        self.failed = 0
        """of those, what a tier did not give back"""
        self.cut = False
        """it was ended by somebody else, at a token that need not be the last one computed"""
        self.node: Node | None = None
        """where its pages end in the prefix tree, locked while it runs"""
        self.computed = 0
        """tokens whose state is in pages, or will be once the launched steps have run"""
        self.prefill_end = 0
        """tokens that were known when it was admitted: from here on it decodes"""
        self.pending = 0
        """tokens that launched steps sample and that are not known yet"""
        self.in_flight = 0
        """launched steps that have not been collected"""
        self.leaving = False
        """it is preempted once its steps in flight are collected"""
        self.preemptions = 0
        self.num_cached = 0
        """prompt tokens found in the prefix tree at its first admission"""
        self.cached_tokens: dict[str, int] = {}
        """where those were: ``device``, or the name of a tier"""
        self.missed_tokens: dict[str, int] = {}
        """why the prompt's other tokens were not (MISS_REASONS)"""
        self.session = request.session
        self.first_step_s: float | None = None
        self.reported = False
        """an output has been given"""
        self.finish_reason: FinishReason | None = None

    @property
    def num_outputs(self) -> int:
        """Generated tokens known so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def starts_group(self) -> bool:
        """Whether others wait for its prompt: it is of a group, and its next token is the first."""
        return self.group is not None and self.num_outputs == 0

    @property
    def readable(self) -> array[int]:
        """The tokens whose beginning may come from the prefix tree: not those whose logits are still wanted."""
        if self.params.skip_reading_prefix_cache and not self.preemptions:
            return self.tokens[:1]
        known = len(self.prompt_logprobs)
        scored = self.params.prompt_logprobs is None or known >= self.prompt_len - 1
        return self.tokens if scored else self.tokens[: known + 1]

    @property
    def planned_outputs(self) -> int:
        """Generated tokens, those in flight included."""
        return self.num_outputs + self.pending

    @property
    def remaining(self) -> int:
        """Tokens it may still sample, beyond those in flight."""
        return self.max_tokens - self.planned_outputs

    @property
    def prefilling(self) -> bool:
        """Whether tokens known at admission are still to be computed."""
        return self.computed < self.prefill_end

    @property
    def num_valid(self) -> int:
        """Tokens whose state in the pages is certain, once nothing is in flight.

        The last token's is left out: a stopped sequence is launched once more, and that row writes nothing.
        """
        return max(min(self.computed, len(self.tokens) - 1), 0)

    @property
    def is_exact(self) -> bool:
        """Whether its block holds the state behind just ``num_valid`` tokens, once nothing is in flight.

        A sequence that ends by itself is stopped on the device at the same token.
        """
        return not self.cut or self.computed == self.num_valid
