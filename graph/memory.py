"""The memory plan: every byte a deployment will take, known before anything is loaded. No torch here.

Weights, rope tables, slots and the arena are exact; workspace and the runtime's own share are bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from treadle.conf.errors import ConfigError
from treadle.conf.size import format_bytes, parse_bytes, spell_bytes
from treadle.graph.checkpoint import WeightInfo
from treadle.graph.demand import Demand, KindPlan
from treadle.graph.footprint import (
    MemoryRow,
    history_row,
    largest,
    rope_tables,
    runtime_row,
    state_rows,
    table_rows,
    weight_rows,
)
from treadle.graph.host_memory import refuse_large_host
from treadle.graph.layer_state import state_of
from treadle.graph.spec import ModelSpec
from treadle.graph.state import PagedKV, State, StateBuilder
from treadle.graph.workspace import INVARIANT_ROWS, workspace_rows

MAX_SEQS = 4096
"""The most sequences a deployment may ask for."""


class MemoryPlanError(ConfigError):
    """A workload that does not fit its memory; says which numbers do."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of the memory."""

    dtype: str
    quantize: str = "none"
    """none or int8"""
    deterministic: bool = False
    """whether steps are computed in blocks of INVARIANT_ROWS on a GPU"""
    page_tokens: int = 16
    max_num_seqs: int
    max_len: int | None = None
    """None: as long as model and memory allow"""
    max_step_tokens: int
    memory_bytes: int
    """what everything may take together"""
    kv_bytes: int | None = None
    """the arena; None: chosen"""
    checkpoints: int | float | None = None
    """what checkpoints may take of the arena: bytes, or a share; None: what nothing else needs; 0: there are none"""
    device: str = "cpu"
    processors: bool = False
    """requests may name logits processors, which see every token of their answer"""
    host: tuple[MemoryRow, ...] = ()
    """main memory for state that leaves the device; on a CPU it is of the same memory"""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where the bytes go, and what fits."""

    rows: tuple[MemoryRow, ...]
    state: State
    arena_bytes: int
    """of the arena, the scratch item at its start included"""
    num_pages: int
    """pages of tokens that all layers see which the arena holds if it holds nothing else, without the scratch item"""
    kinds: tuple[KindPlan, ...]
    """what ``full_sequences`` take of every kind of state"""
    checkpoint_bytes: int
    """what checkpoints may take of the arena; 0 where there are none"""
    max_len: int
    """tokens of the longest sequence that will be served"""
    max_num_seqs: int
    max_step_tokens: int
    full_sequences: int
    """of ``max_num_seqs``, those that the arena holds at once if each has ``max_len`` tokens"""
    largest_context: int
    """the most that ``model.max_len`` could ask for in this memory"""
    largest_num_seqs: int
    """the most that ``max_num_seqs`` could be, each of ``max_len`` tokens, in an arena of all that is left"""
    memory_bytes: int
    """what everything may take together"""
    processors: bool
    """slots remember every token, for logits processors"""
    host: tuple[MemoryRow, ...] = ()
    """rows of the host's memory, beside ``rows``, which are of the device's"""

    @property
    def kv(self) -> PagedKV:
        """The pages of layers that see all tokens."""
        return self.state.full

    @property
    def beside_bytes(self) -> int:
        """Bytes of the longest sequence beside the first group's pages: what it sees of windows, and its block."""
        demand = Demand(self.state, self.max_step_tokens)
        counts = demand.sequence(self.max_len, step_tokens=1)
        return sum(count * size for count, size in zip(counts[1:], demand.item_bytes[1:]))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of what lives only inside a step, captured ones left out."""
        return sum(row.nbytes for row in self.rows if row.kind == "workspace")

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nothing takes."""
        return self.memory_bytes - self.total_bytes


def plan_memory(spec: ModelSpec, weights: Mapping[str, WeightInfo], workload: Workload) -> MemoryPlan:
    """Return the plan of a model with these canonical weights under ``workload``.

    The arena, when not given: on a GPU all that is left; on a CPU as much as ``max_num_seqs`` full sequences need, but
    at most half of what is left (a laptop runs other programs), or one full sequence if that is more.

    Raises: MemoryPlanError if the weights, one sequence of ``max_len``, or a page for each sequence do not fit.
    """
    return _Planner(spec, weights, workload).plan()


def step_rows(work: Workload) -> tuple[int, int]:
    """Return how many rows of logits, and tokens, a step computes at most: in whole blocks where it works in blocks."""
    block = INVARIANT_ROWS if work.deterministic and work.device == "cuda" else 1
    return -(-work.max_num_seqs // block) * block, -(-work.max_step_tokens // block) * block


class _Planner:
    def __init__(self, spec: ModelSpec, weights: Mapping[str, WeightInfo], work: Workload) -> None:
        self.spec, self.weights, self.work = spec, weights, work
        self.state = state_of(spec, weights, StateBuilder(work.dtype, work.page_tokens))
        self.demand = Demand(self.state, work.max_step_tokens, checkpoints=work.checkpoints != 0)
        self.modest = work.kv_bytes is None and work.device == "cpu"
        self.fixed = [
            *weight_rows(spec, weights, work.dtype, work.quantize, work.device),
            *workspace_rows(spec, work.dtype, work.quantize, work.device, *step_rows(work)),
            runtime_row(work.device),
            *(work.host if work.device == "cpu" else ()),
        ]

    def plan(self) -> MemoryPlan:
        """Return the plan with every choice made."""
        longest = largest(self.spec.max_positions, self.fits)
        max_len = self.choose_len(longest)
        arena = self.choose_arena(max_len)
        full = largest(self.work.max_num_seqs, lambda count: self.demand.fits(self.running(count, max_len), arena))
        kinds = tuple(map(KindPlan, self.demand.names, self.demand.item_bytes, self.bytes_of(max(full, 1), max_len)))
        checkpoints = self.choose_checkpoints(arena, max_len)
        num_pages = self.demand.cut(arena).most(0)
        return MemoryPlan(
            rows=(*self.fixed, *self.tables(max_len), *state_rows(self.state, arena, num_pages, kinds)),
            state=self.state,
            arena_bytes=arena,
            num_pages=num_pages,
            kinds=kinds,
            checkpoint_bytes=checkpoints,
            max_len=max_len,
            max_num_seqs=self.work.max_num_seqs,
            max_step_tokens=self.work.max_step_tokens,
            full_sequences=full,
            largest_context=max(longest, max_len),
            largest_num_seqs=largest(MAX_SEQS, lambda count: self.among(count, kv_bytes=None).holds_all(max_len)),
            memory_bytes=self.work.memory_bytes,
            processors=self.work.processors,
            host=() if self.work.device == "cpu" else self.work.host,
        )

    def choose_len(self, longest: int) -> int:
        """Return the asked length, or the longest that fits; refuse what does not."""
        asked = self.work.max_len
        if longest == 0:
            self.refuse_model()
        if asked is None:
            # What grows with a length that nobody asked for takes nothing of an arena that somebody did.
            return largest(longest, self.fits_half if self.modest else self.is_whole) or longest
        if asked <= longest:
            return asked
        if asked > self.spec.max_positions:
            if any(table.scaling.rope_type in ("dynamic", "yarn", "longrope") for table in rope_tables(self.spec)):
                longest = largest(asked, self.fits)
                if longest == asked:
                    return asked
            else:
                raise MemoryPlanError(
                    f"the model was made for {self.spec.max_positions} tokens",
                    key="model.max_len",
                    value=asked,
                    nearest=[f"model.max_len={longest}"],
                )
        needed = format_bytes(self.demand.arena_bytes(self.demand.least(1, asked)), up=True)
        shorter = largest(longest, self.is_whole)
        raise MemoryPlanError(
            f"one such sequence needs an arena of {needed}, {format_bytes(self.room(asked))} are left",
            key="model.max_len",
            value=asked,
            nearest=[*([f"model.max_len={shorter}"] if shorter else []), self.enough(asked)],
        )

    def choose_arena(self, max_len: int) -> int:
        """Return the bytes of the arena."""
        most = self.demand.usable(self.room(max_len))
        if not self.modest:
            return most
        full = self.demand.arena_bytes(self.wanted(max_len))
        # Of two arenas the smaller one may happen to be cut so that it holds less.
        half = min(full, self.demand.usable(most // 2))
        least = self.demand.arena_bytes(self.least(max_len))
        return min(most, half if half >= least and self.demand.fits(self.least(max_len), half) else least)

    def choose_checkpoints(self, arena: int, max_len: int) -> int:
        """Return the bytes that checkpoints may take; refuse what holds none."""
        asked = self.work.checkpoints
        if asked == 0:
            return 0
        most = arena - self.state.scratch_bytes
        if asked is None:
            return most
        given = min(most, asked if isinstance(asked, int) else int(arena * asked))
        one = sum(count * size for count, size in zip(self.demand.checkpoint(max_len), self.demand.item_bytes))
        if given < one:
            raise MemoryPlanError(
                f"that is {format_bytes(given)}, and a checkpoint of this model takes {format_bytes(one)}",
                key="kv.checkpoints",
                value=asked if isinstance(asked, int) else f"{100 * asked:g}%",
                nearest=[f"kv.checkpoints={spell_bytes(one, up=True)}", "kv.prefix_cache=false"],
            )
        return given

    def tables(self, max_len: int) -> list[MemoryRow]:
        """Return what grows with the longest sequence."""
        work = self.work
        rows = table_rows(self.spec, self.state, work.device, work.max_num_seqs, work.max_step_tokens, max_len)
        if work.processors:
            rows.append(history_row(work.max_num_seqs, max_len))
        return rows

    def room(self, max_len: int) -> int:
        """Return the bytes that an arena may take when sequences may be this long."""
        left = self.work.memory_bytes - self.beside(max_len)
        return left if self.work.kv_bytes is None else min(left, self.work.kv_bytes)

    def beside(self, max_len: int) -> int:
        """Return the bytes of all but the arena."""
        return sum(row.nbytes for row in (*self.fixed, *self.tables(max_len)))

    def least(self, max_len: int) -> list[int]:
        """Return the items without which nothing runs."""
        return self.demand.least(self.work.max_num_seqs, max_len)

    def running(self, num_seqs: int, max_len: int) -> list[int]:
        """Return the items of so many sequences of this length."""
        return self.demand.running(num_seqs, max_len)

    def wanted(self, max_len: int) -> list[int]:
        """Return the items that all sequences can use, each of this length, with a checkpoint for each."""
        count = self.work.max_num_seqs
        full, *others = self.running(count, max_len)
        kept = self.demand.checkpoint(max_len)
        return [full + 1, *(items + count * each for items, each in zip(others, kept[1:]))]

    def bytes_of(self, num_seqs: int, max_len: int) -> list[int]:
        """Return the bytes of every kind that so many sequences of this length take."""
        return [count * size for count, size in zip(self.running(num_seqs, max_len), self.demand.item_bytes)]

    def fits(self, max_len: int) -> bool:
        """Return whether sequences may be this long."""
        return self.demand.fits(self.least(max_len), self.room(max_len))

    def fits_half(self, max_len: int) -> bool:
        """Return whether sequences may be this long in half of what is left."""
        return self.demand.fits(self.least(max_len), self.room(max_len) // 2)

    def holds_all(self, max_len: int) -> bool:
        """Return whether an arena can hold all sequences that run together, each of this length."""
        running, least = self.running(self.work.max_num_seqs, max_len), self.least(max_len)
        return self.demand.fits([max(each) for each in zip(running, least)], self.room(max_len))

    def among(self, max_num_seqs: int, **changes: Any) -> _Planner:
        """Return the planner of the same model for another number of sequences, and other ``changes``."""
        return _Planner(self.spec, self.weights, replace(self.work, max_num_seqs=max_num_seqs, **changes))

    def refuse_model(self) -> NoReturn:
        """Say what keeps even one token from fitting."""
        least = self.demand.arena_bytes(self.demand.least(1, 1))
        bare = self.among(self.work.max_num_seqs, host=())
        if self.work.host and bare.fits(1):
            # What a plan without it leaves, so that what is proposed costs no sequence its length.
            left, whole = bare.plan().free_bytes, self.work.memory_bytes
            refuse_large_host(self.work.host, left, f"the model leaves {format_bytes(left)} of {format_bytes(whole)}")
        asked = self.work.max_len or 1
        enough = self.enough(asked)
        fewer = largest(self.work.max_num_seqs, lambda count: self.among(count).is_whole(asked))
        if fewer:
            raise MemoryPlanError(
                "every sequence needs a page and a row of logits, and that is more than is left",
                key="scheduler.max_num_seqs",
                value=self.work.max_num_seqs,
                nearest=[f"scheduler.max_num_seqs={fewer}", enough],
            )
        if self.work.kv_bytes is not None and self.work.kv_bytes < least:
            raise MemoryPlanError(
                f"even one token needs an arena of {format_bytes(least, up=True)}",
                key="kv.memory",
                value=format_bytes(self.work.kv_bytes),
                nearest=[enough],
            )
        needed = format_bytes(self.among(1, host=()).beside(1) + least, up=True)
        weights = sum(row.nbytes for row in self.fixed if row.kind == "weights")
        smaller = "; passes.quantize=int8 makes them smaller" if self.work.quantize == "none" else ""
        raise MemoryPlanError(
            "the model does not fit with the other keys as they are",
            key="hardware.memory",
            value=format_bytes(self.work.memory_bytes),
            nearest=[enough],
            hint=f"one token alone needs {needed}, weights take {format_bytes(weights)}{smaller}",
        )

    def is_whole(self, max_len: int) -> bool:
        """Return whether sequences may be this long beside an arena of the size that was asked for."""
        left = self.work.memory_bytes - self.beside(max_len)
        return self.fits(max_len) and (self.work.kv_bytes or 0) <= left

    def enough(self, max_len: int) -> str:
        """Return what the arena or the memory must be for sequences of this length, all other keys as they are."""
        beside, needed = self.beside(max_len), self.demand.arena_bytes(self.least(max_len))
        given, text = self.work.kv_bytes, spell_bytes(needed, up=True)
        small = given is not None and given < needed
        if beside + needed > self.work.memory_bytes:
            arena = max(parse_bytes(text), given or 0)
            also = f"kv.memory={text} " if small else ""
            return f"{also}hardware.memory={spell_bytes(beside + arena, up=True)}"
        # The rounded one may be more than there is.
        return f"kv.memory={text if beside + parse_bytes(text) <= self.work.memory_bytes else needed}"
