"""Does steps on the device: takes a packet, runs the program, samples, and sends the tokens back.

Everything that a step reads and writes is in the same place every time, so that a step of a bucket's shape is replayed
where the backend captures. Other steps are launched op by op. All of it runs on the stream, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from treadle.graph.buckets import Buckets
from treadle.graph.packet import MAX_ASKED, Column, StepShape, sections
from treadle.graph.program import StepInputs
from treadle.graph.state import UNIT_BYTES
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.adjust_logits import note_tokens
from treadle.kernels.backend.protocol import Backend, Stream
from treadle.kernels.sample import token_kernels
from treadle.runtime.capture import CapturedStep, capture_step
from treadle.runtime.packet import NUM_STAGES, Packet, PacketWriter, Processed, Scored
from treadle.runtime.plan import ByteCopy
from treadle.runtime.request import MAX_LOGPROBS
from treadle.runtime.sampler import VARIANTS, Changes, Samples, Scores, sample, score, variant
from treadle.runtime.sequence import Needs
from treadle.runtime.slots import Slots

KINDS_OF_TOKENS = (8191, 1024, 1023, 640, 641)
KINDS_OF_SEQS = (1, 3, 16)
"""Sizes of launched steps for which kernels may differ: ones, multiples of 16, others; around limits of kernels."""


class Executor(Protocol):
    """What computes: weights and compiled bodies over an arena that it was given when it was made."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """Return logits [R, V] of the wanted rows, after writing the new tokens' state into the arena.

        In every layer the state of all T tokens is written before any of it is read: a sequence may begin with pages
        that another one fills in the same step.
        """
        ...

    def trunk(self, inputs: StepInputs) -> Callable[[Tensor], Tensor]:
        """Do the same but for the logits; return what gives those of any rows [R] of the T, as often as is wanted."""
        ...


class Stepper:
    """Owns the slots, the device's packet, and the buffers of what was sampled, on the device and on the host."""

    def __init__(
        self, *, executor: Executor, backend: Backend, arena: Tensor, largest: StepShape, num_groups: int,
        max_pages: int, max_seq_tokens: int, buckets: Buckets, vocab: int, history: bool,
    ) -> None:  # fmt: skip
        """``largest`` bounds the steps that are asked for; ``max_seq_tokens`` the length of a sequence.

        ``max_pages``: of a sequence in each of ``num_groups`` groups of states, all in the bytes ``arena``. With
        ``history`` slots remember every token, for processors.
        """
        self.executor = executor
        self._arena = arena
        self._backend = backend
        self._largest, self._buckets, self._max_seq_tokens = largest, buckets, max_seq_tokens
        self._slots = Slots(
            largest.num_seqs, num_groups, max_pages, backend, vocab=vocab,
            history_tokens=max_seq_tokens if history else 0,
        )  # fmt: skip
        self.writer = PacketWriter(
            backend, buckets, largest, max_pages=num_groups * max_pages, nobody=self._slots.nobody, vocab=vocab
        )
        bound = self.writer.bound
        self._packet = torch.zeros(self.writer.capacity, dtype=torch.int32, device=backend.device)
        tables = (num_groups, bound.num_seqs, max_pages)
        self._page_tables = torch.zeros(tables, dtype=torch.int32, device=backend.device)
        self._blocks = torch.zeros(bound.num_seqs, dtype=torch.int32, device=backend.device)
        self._out = _samples(lambda n: torch.zeros(n, dtype=torch.uint8, device=backend.device), bound.num_rows)
        self._host = [_samples(backend.host, bound.num_rows) for _ in range(NUM_STAGES)]
        target = Target(device=backend.name, features=backend.features)
        self._begin, self._end = (registry.candidates(op, target, {})[0].function for op in ("begin_step", "end_step"))
        self._token_kernels = token_kernels(backend.name)
        self._captured: dict[StepShape, CapturedStep] = {}

    @torch.inference_mode()
    def run(self, packet: Packet) -> Samples:
        """Do one step; return what it sampled, in host memory that is valid until two steps later.

        Must be called on the stream.
        """
        with self._backend.at_work(packet.shape.num_tokens):
            return self._do(packet)

    def _do(self, packet: Packet) -> Samples:
        self._send(packet)
        for load in packet.loads:
            self._slots.load(load)
        self.copy(packet.before)
        special = packet.scored is not None or packet.processed
        scored = None
        if packet.captured and not special:
            self._captured[packet.shape].replay(variant(packet.needs))
        else:
            scored = self._launch(packet)
        self.copy(packet.after)
        return self._receive(packet, scored)

    def copy(self, copies: Sequence[ByteCopy]) -> None:
        """Copy inside the arena, one after the other. Must be called on the stream."""
        for source, target, num_bytes in copies:
            there, here = target * UNIT_BYTES, source * UNIT_BYTES
            self._arena[there : there + num_bytes].copy_(self._arena[here : here + num_bytes])

    def _launch(self, packet: Packet) -> Scores | None:
        """Do a step, or part of it, op by op; return what its prompts' tokens scored."""
        needs = VARIANTS[variant(packet.needs)] if self._backend.captures else packet.needs
        if packet.scored is not None:
            self._begin_step(packet.shape)
            inputs = self._inputs(packet.shape)
            head = self.executor.trunk(inputs)
            self._finish(head(inputs.logit_rows), packet.shape, needs, packet.processed)
            return self._score(head, packet.scored)
        if packet.captured:
            captured = self._captured[packet.shape]
            captured.forward()
            logits = captured.logits
        else:
            logits = self._forward(packet.shape)
        self._finish(logits, packet.shape, needs, packet.processed)
        return None

    def _score(self, head: Callable[[Tensor], Tensor], scored: Scored) -> Scores:
        """Return the log-probabilities of tokens of prompts, in host memory."""
        block = self.writer.bound.num_rows
        positions, targets = (self._upload(torch.from_numpy(each)) for each in (scored.positions, scored.targets))
        parts = []
        # As many rows at a time as a step may sample from: more logits have no place.
        for first in range(0, len(positions), block):
            rows = slice(first, first + block)
            parts.append(score(head(positions[rows]), targets[rows], scored.num_top))
        whole = [torch.cat(columns) for columns in zip(*(part[:4] for part in parts))]
        return Scores(*(self._download(column) for column in whole))

    def _upload(self, values: Tensor) -> Tensor:
        host = self._backend.host(values.nbytes).view(values.dtype).view(values.shape)
        return host.copy_(values).to(self._backend.device, non_blocking=True)

    def _download(self, values: Tensor) -> Tensor:
        host = self._backend.host(values.nbytes).view(values.dtype).view(values.shape)
        return host.copy_(values, non_blocking=True)

    def warm_up(self, stream: Stream, progress: Callable[[int, int], None] | None, workspace_bytes: int) -> None:
        """Run the largest steps, so that memory is taken and kernels are compiled, and capture every bucket.

        Temporaries of steps come from ``workspace_bytes`` taken first. Every page is the scratch page, which belongs
        to nobody. ``progress`` is told (steps done, steps in all). Raises what the program raises.
        """
        stream.submit(self._backend.reserve, workspace_bytes).wait()
        jobs = [*self._warm_ups(), *((shape, True) for shape in self._buckets.all)]
        for done, (shape, captured) in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs))
            longest = 0 if captured and shape in self._buckets.decode else self._max_seq_tokens
            packet = self.writer.scratch(shape, longest=longest, captured=captured, needs=VARIANTS[-1])
            stream.submit(self._capture if captured else self.run, packet).wait()

    def _warm_ups(self) -> Iterator[tuple[StepShape, bool]]:
        """Yield steps that are launched op by op, the largest first, and that they are not captured.

        Where kernels are compiled as they are first launched, every kind of size is among them.
        """
        most, seqs, _ = self._largest
        most = min(most, seqs * self._max_seq_tokens)
        sizes, counts = ((most, 1), (1,)) if not self._backend.captures else ((most, *KINDS_OF_TOKENS), KINDS_OF_SEQS)
        for tokens in dict.fromkeys(size for size in sizes if size <= most):
            fewest = -(-tokens // self._max_seq_tokens)
            for num_seqs in dict.fromkeys(min(max(count, fewest), seqs, tokens) for count in (seqs, *counts)):
                yield StepShape(tokens, num_seqs, num_seqs), False

    def _send(self, packet: Packet) -> None:
        self._packet[: len(packet.data)].copy_(packet.data, non_blocking=True)

    @torch.inference_mode()
    def _capture(self, packet: Packet) -> None:
        self._send(packet)
        self._captured[packet.shape] = capture_step(self._backend, packet.shape, self._forward, self._finish)

    def _begin_step(self, shape: StepShape) -> None:
        slots = self._slots
        self._begin(slots.rows, slots.page_tables, self._packet, self._page_tables, self._blocks, *shape)

    def _forward(self, shape: StepShape) -> Tensor:
        self._begin_step(shape)
        return self.executor.forward(self._inputs(shape))

    def _inputs(self, shape: StepShape) -> StepInputs:
        """Return the parts of the packet, as views."""
        at, packet, wide = sections(shape), self._packet, self._packet.view(torch.int64)
        tokens, seqs, rows = shape
        return StepInputs(
            token_ids=wide[at.token_ids // 2 : at.token_ids // 2 + tokens],
            positions=wide[at.positions // 2 : at.positions // 2 + tokens],
            seq_ids=packet[at.seq_ids : at.seq_ids + tokens],
            q_starts=packet[at.q_starts : at.q_starts + seqs + 1],
            kv_lens=packet[at.kv_lens : at.kv_lens + seqs],
            page_tables=self._page_tables[:, :seqs],
            blocks=self._blocks[:seqs],
            logit_rows=wide[at.logit_rows // 2 : at.logit_rows // 2 + rows],
        )

    def _finish(self, logits: Tensor, shape: StepShape, needs: Needs, processed: Sequence[Processed] = ()) -> None:
        """Sample into the buffers, and note the tokens in the slots."""
        at, rows = sections(shape), shape.num_rows
        slots = self._packet.view(torch.int64)[at.sample_slots // 2 : at.sample_slots // 2 + rows]
        params = self._slots.row_params(slots) if needs.sampled or needs.masked else None
        changes = None
        if needs.adjusted or needs.asked:
            in_python = {each.row: partial(self._process, each) for each in processed}
            changes = Changes(slots, self._slots.controls, in_python)
        samples = sample(logits, params, needs, self._token_kernels, changes)
        if needs.adjusted:
            note = note_tokens if self._token_kernels is None else self._token_kernels.note_tokens
            note(samples.tokens, slots, self._slots.controls)
        self._end(self._slots.rows, self._packet, samples.tokens, self._out.tokens, *shape)
        # The tokens are there already.
        for name in _fields(needs)[1:]:
            buffer, values = getattr(self._out, name), getattr(samples, name)
            part = buffer[:rows] if values.ndim == 1 else buffer[:rows, : values.shape[1]]
            part.copy_(values)

    def _process(self, row: Processed, logits: Tensor) -> None:
        """Let processors change a row of logits."""
        tokens = self._slots.history[row.slot, : row.num_tokens]
        if row.decodes:
            tokens[-1] = self._slots.rows[row.slot, Column.LAST_TOKEN]
        row.processors.apply(tokens.long(), logits)

    def _receive(self, packet: Packet, scored: Scores | None) -> Samples:
        host, rows = self._host[packet.stage], packet.num_rows
        parts = {
            name: getattr(host, name)[:rows].copy_(getattr(self._out, name)[:rows], non_blocking=True)
            for name in _fields(packet.needs)
        }
        return Samples(**parts, scored=scored)


def _fields(needs: Needs) -> tuple[str, ...]:
    """Return which fields of Samples a step gives, the tokens first."""
    if needs.logprobs is None:
        return ("tokens",)
    every = ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs", "asked_logprobs")
    return every if needs.asked else every[:-1]


def _samples(allocate: Callable[[int], Tensor], rows: int) -> Samples:
    """Return buffers for so many rows."""

    def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
        return allocate(rows * dtype.itemsize * max(shape, default=1)).view(dtype).view(rows, *shape)

    return Samples(
        tokens=buffer(torch.int64),
        logprobs=buffer(torch.float32),
        ranks=buffer(torch.int64),
        top_ids=buffer(torch.int64, MAX_LOGPROBS),
        top_logprobs=buffer(torch.float32, MAX_LOGPROBS),
        asked_logprobs=buffer(torch.float32, MAX_ASKED),
    )
