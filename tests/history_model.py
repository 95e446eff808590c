"""A stand-in for a program whose answer depends on every token of the history, as read back from the arena.

It stores (token, position) pairs in pages of every group and hashes them, and keeps a running hash in a block, if there
is one. A wrong page, position, length or order changes the tokens, and so does a window's page, or a block, of another
history; ``answer`` computes what they must be without engine, pages or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from arenas import make_arena
from capturing_backend import CapturingBackend
from torch import Tensor

from treadle.graph.buckets import assign_buckets
from treadle.graph.program import StepInputs
from treadle.graph.state import UNIT_BYTES, Block, BlockPart, LayerKV, PagedKV, State
from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.backend.protocol import Stream
from treadle.runtime.engine import Engine, EngineSettings
from treadle.runtime.request import Output, Request, SamplingParams, SessionHint, spread
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.tiers.tiers import Link, Tiers

VOCAB = 24
PAGE_TOKENS = 4
KV = PagedKV(name="full", layers=(LayerKV(kv_heads=1, k_dim=2, v_dim=2),), dtype="float32", page_tokens=PAGE_TOKENS)
STATE = State(groups=(KV,))


def window(size: int, k_dim: int = 2, chunk: int = 0) -> PagedKV:
    """A group of layers that see ``size`` tokens."""
    layers = (LayerKV(kv_heads=1, k_dim=k_dim, v_dim=2),)
    name = f"window {size}, {chunk}"
    return PagedKV(name=name, layers=layers, dtype="float32", page_tokens=PAGE_TOKENS, window=size, chunk=chunk)


def block(floats: int = 192) -> Block:
    """A block of so many floats; two numbers at its beginning are used."""
    return Block(parts=(BlockPart(kind="delta", shape=(floats,), dtype="float32"),))


RECURRENT = State(groups=(KV,), block=block())
HYBRID = State(groups=(KV, window(9, k_dim=30), window(0, chunk=8)), block=block(320))
WINDOWED = State(groups=(KV, window(6)))
STATES = {"full": STATE, "recurrent": RECURRENT, "hybrid": HYBRID, "windowed": WINDOWED}
_WRITTEN = 1 << 40


def fold(state: int, token: int, position: int) -> int:
    return (state * 31 + token * 7 + position + 1) % 1_000_003


def scores(state: int) -> list[float]:
    return [((state + 1) * (token + 3) * 40503 % 65537) / 65537 * 6 for token in range(VOCAB)]


def answer(prompt: list[int], count: int, stops: tuple[int, ...] = ()) -> list[int]:
    """Return what a greedy request must answer."""
    state, tokens = 0, []
    for position, token in enumerate(prompt):
        state = fold(state, token, position)
    for _ in range(count):
        row = scores(state)
        token = max(range(VOCAB), key=row.__getitem__)
        tokens.append(token)
        if token in stops:
            break
        state = fold(state, token, len(prompt) + len(tokens) - 1)
    return tokens


class HistoryModel:
    """An executor over an arena of ``state``. ``poison``: a token whose presence in a history gives NaN logits."""

    def __init__(self, arena: Arena, state: State = STATE, poison: int | None = None) -> None:
        self._cells = arena.bytes.view(torch.int64)
        self._state = state
        self._poison = poison
        self.fail_at: int | None = None
        self.warming = False
        """what is computed belongs to nobody"""
        self.steps = 0
        self.step_tokens: list[int] = []
        self.head_rows: list[int] = []
        # Of each token of the step, what the block held behind it.
        self._hashes: list[int] = []

    def forward(self, inputs: StepInputs) -> Tensor:
        self._check(inputs)
        if self.warming:
            return torch.zeros(len(inputs.logit_rows), VOCAB)
        self.steps += 1
        self.step_tokens.append(len(inputs.token_ids))
        if self.fail_at == self.steps:
            raise ArithmeticError("the program broke")
        for token, position, row in zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.seq_ids.tolist()):
            for table in inputs.page_tables if position >= 0 else ():
                self._cells[self._at(table, row, position)] = _WRITTEN + position * VOCAB + token
        if self._state.block is not None:
            self._advance_blocks(inputs)
        return self._head(inputs, inputs.logit_rows)

    def trunk(self, inputs: StepInputs) -> Callable[[Tensor], Tensor]:
        self.forward(inputs)
        return partial(self._head, inputs)

    def _head(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        self.head_rows.append(len(rows))
        logits = [self._logits(inputs, index) for index in rows.tolist()]
        return torch.tensor(logits, dtype=torch.float32).view(-1, VOCAB)

    def _advance_blocks(self, inputs: StepInputs) -> None:
        """Fold every token into its sequence's block, which also counts them."""
        self._hashes = []
        for token, position, row in zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.seq_ids.tolist()):
            if position < 0:
                self._hashes.append(0)
                continue
            offset = int(inputs.blocks[row])
            assert offset > 0, "a block is the scratch item"
            cell = offset * UNIT_BYTES // 8
            state, count = self._cells[cell : cell + 2].tolist() if position else (0, 0)
            # A block of another history, or of this one elsewhere, is told apart for good.
            state = fold(state if count == position else -1, token, position)
            self._cells[cell] = state
            self._cells[cell + 1] = position + 1
            self._hashes.append(state)

    def _logits(self, inputs: StepInputs, index: int) -> list[float]:
        row, position = int(inputs.seq_ids[index]), int(inputs.positions[index])
        if position < 0:
            return [0.0] * VOCAB
        assert position < int(inputs.kv_lens[row])
        state = 0
        cells = [int(self._cells[self._at(inputs.page_tables[0], row, each)]) for each in range(position + 1)]
        for cell in cells:
            assert cell >= _WRITTEN, "a history has a hole"
            stored, token = divmod(cell - _WRITTEN, VOCAB)
            if token == self._poison:
                return [float("nan")] * VOCAB
            state = fold(state, token, stored)
        for group, table in zip(self._state.groups[1:], inputs.page_tables[1:]):
            for each in range(group.first_needed(position), position + 1):
                found = int(self._cells[self._at(table, row, each)])
                state = state if found == cells[each] else state + found + 1
        if self._state.block is not None and self._hashes[index] != state:
            state += 1 + abs(self._hashes[index])
        return scores(state)

    @staticmethod
    def _at(page_table: Tensor, row: int, position: int) -> int:
        page = int(page_table[row, position // PAGE_TOKENS])
        assert page > 0, "a token belongs to the scratch page"
        return page * UNIT_BYTES // 8 + position % PAGE_TOKENS

    @staticmethod
    def _check(inputs: StepInputs) -> None:
        num_seqs, num_tokens = len(inputs.kv_lens), len(inputs.token_ids)
        assert inputs.q_starts.tolist()[0] == 0
        end = inputs.q_starts.tolist()[-1]
        assert set(inputs.positions[end:num_tokens].tolist()) <= {-1}
        assert inputs.page_tables.shape[1] == num_seqs == len(inputs.q_starts) - 1
        assert inputs.token_ids.dtype == inputs.positions.dtype == inputs.logit_rows.dtype == torch.int64
        assert inputs.seq_ids.dtype == inputs.q_starts.dtype == inputs.kv_lens.dtype == torch.int32
        assert inputs.page_tables.dtype == inputs.blocks.dtype == torch.int32
        for row, (begin, end) in enumerate(zip(inputs.q_starts[:-1].tolist(), inputs.q_starts[1:].tolist())):
            assert set(inputs.seq_ids[begin:end].tolist()) <= {row}
            length = int(inputs.kv_lens[row])
            expected = list(range(length - (end - begin), length)) if length else [-1] * (end - begin)
            assert inputs.positions[begin:end].tolist() == expected


class Bench:
    """An engine over a HistoryModel, and what came out of it."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        poison: int | None = None,
        captured: bool = False,
        state: State = STATE,
        others: int | None = None,
        host_bytes: int = 0,
        links: Sequence[Link] = (),
        **settings: object,
    ) -> None:
        """``captured``: steps are padded to buckets and replayed, as on a GPU.

        The arena holds ``num_pages`` of the first group and ``others`` of every other kind at once;
        what leaves it has ``host_bytes``, and the stores of ``links`` below.
        """
        self._links = links
        self.backend = backend = CapturingBackend() if captured else CpuBackend(threads=1)
        self.arena = make_arena(state, {0: num_pages, **dict.fromkeys(range(1, 9), others or num_pages)}, backend)
        self.model = HistoryModel(self.arena, state, poison)
        options = {
            "max_len": 256,
            "max_num_seqs": 4,
            "max_step_tokens": 16,
            "vocab": VOCAB,
            "checkpoint_tokens": 4,
        } | settings
        limits = EngineSettings(**options)
        buckets = assign_buckets(limits.max_num_seqs, limits.max_step_tokens) if captured else None
        self.engine = Engine(
            executor=self.model,
            backend=backend,
            arena=self.arena,
            state=state,
            settings=limits,
            buckets=buckets,
            tiers=partial(self._open_tiers, host_bytes),
        )
        if captured:
            self.model.warming = True
            self.engine.warm_up()
            self.model.warming = False
        self.outputs: dict[str, list[Output]] = {}

    def _open_tiers(self, host_bytes: int, stream: Stream) -> Tiers | None:
        if not host_bytes:
            return None
        sizes = [pool.item_bytes for pool in self.arena.pools]
        return Tiers(
            self.backend, self.arena.bytes, stream, host_bytes=host_bytes, sizes=sizes, model="history", layout="0",
            links=self._links,
        )  # fmt: skip

    def add(
        self, name: str, prompt: list[int], *, eos_ids: tuple[int, ...] = (), salt: str | None = None,
        session: SessionHint | None = None, **params: object,
    ) -> None:  # fmt: skip
        made = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params)
        self.engine.add(Request(id=name, prompt=prompt, params=made, eos_ids=eos_ids, cache_salt=salt, session=session))

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)
        return outputs

    def run(self, limit: int = 2000) -> Bench:
        """Step until nothing is left to do."""
        while self.engine.has_work:
            self.step()
            limit -= 1
            assert limit, "no progress"
        return self

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def reason(self, name: str) -> str | None:
        reasons = [output.finish_reason for output in self.outputs[name]]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]

    def close(self) -> None:
        """End the engine after checking that it is empty: whatever is not free can be evicted at once."""
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
        self.engine.close()


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def logits_after(tokens: list[int]) -> list[float]:
    """Return what the program gives behind ``tokens``."""
    state = 0
    for position, token in enumerate(tokens):
        state = fold(state, token, position)
    return scores(state)


def choices(bench: Bench, name: str, prompt: list[int], n: int, **params: object) -> list[str]:
    """Add a request with ``n`` answers; return their ids."""
    made = SamplingParams(**{"temperature": 1.0, "max_tokens": 9, "n": n, "seed": 40} | params)
    requests = spread(Request(id=name, prompt=prompt, params=made))
    for request in requests:
        bench.engine.add(request)
    return [request.id for request in requests]


def add(bench: Bench, name: str, prompt: list[int], words: tuple[tuple[int, ...], ...] = (), **params: object) -> None:
    """Add a request of 12 greedy tokens with bad ``words``."""
    made = SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | params)
    bench.engine.add(Request(id=name, prompt=prompt, params=made, bad_token_ids=words))
