"""Random histories for each op with a block state, and scripts of steps that run through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import block_steps
import torch
from block_steps import ROW, Op, Steps, merge
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """One op with a history for each sequence."""

    oracle: Callable[..., tuple[Tensor, Tensor]]
    rows: list[list[Tensor]]
    constants: list[Any]
    after: list[Any]
    part_bytes: int
    state_dtype: torch.dtype = torch.float32
    alike: bool = False
    """Keys all but repeat: what a token teaches is what is left of larger numbers, each from rounded operands."""

    def expected(self, sequence: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The results of the first ``tokens`` tokens, and the state behind them."""
        return self.oracle(*merge([x[:tokens] for x in self.rows[sequence]], self.constants), *self.after)


class Step(NamedTuple):
    """Pairs (sequence, tokens); those of ``dead`` have ended."""

    pairs: list[tuple[int, int]]
    padding: int = 0
    dead: tuple[int, ...] = ()


SCRIPTS = {
    "one token at a time": [Step([(1, 1), (0, 1), (2, 1)])] * 3,
    "a prompt, then tokens": [Step([(0, 7)]), Step([(0, 1)]), Step([(0, 1), (1, 1)], 2)],
    "prompts cut in two": [
        Step([(0, 70), (1, 3), (2, 21)], 5), Step([(2, 130), (0, 1), (1, 64)]), Step([(1, 1), (0, 65), (2, 1)], 1),
    ],
    "beside sequences that end": [
        Step([(0, 33), (1, 2)]), Step([(2, 1), (0, 1), (1, 40)], 3, (0, 1)), Step([(0, 0), (1, 90), (2, 1)], 0, (2,)),
        Step([(0, 1), (2, 1), (1, 0)]),
    ],
}  # fmt: skip
SHORT = [Step([(0, 67), (1, 2)], 2), Step([(1, 33), (0, 1)]), Step([(0, 18)])]
"""A script with few tokens, for kernels that take long."""
LONGEST = 160
"""Tokens that a script takes of one sequence at most."""


def play(
    op: Op, case: Case, script: Sequence[Step], dtype: torch.dtype, device: str = "cpu", exact: bool = True,
    **options: Any,
) -> Steps:  # fmt: skip
    """Run ``script``; results, states and everything around them must be what they should be.

    ``exact``: what is added to a state must not have been rounded to ``dtype`` on the way.
    """
    steps = Steps(len(case.rows), case.part_bytes, device)
    got: list[list[Tensor]] = [[] for _ in case.rows]
    tolerance = TOLERANCE[dtype]
    for pairs, padding, dead in script:
        before = steps.memory.clone()
        results = steps.run(op, case.rows, case.constants, case.after, pairs, padding, dead, **options)
        live = {sequence for index, (sequence, tokens) in enumerate(pairs) if tokens and index not in dead}
        for index, (sequence, _) in enumerate(pairs):
            if index not in dead:
                got[sequence].append(results[index])
        after = steps.memory.clone()
        for sequence in live:
            begin = steps.blocks[sequence] * block_steps.UNIT + steps.offset
            after[begin : begin + case.part_bytes] = before[begin : begin + case.part_bytes]
        assert torch.equal(after, before), "memory of others is touched"
    for sequence, tokens in enumerate(steps.at):
        if not tokens:
            continue
        out, state = case.expected(sequence, tokens)
        mine = torch.cat(got[sequence]).double()
        kept = steps.part(sequence).cpu().view(case.state_dtype).reshape(state.shape).double()
        if device == "cuda" and dtype is not torch.float32:
            # Tensor cores take rounded operands: single elements, near 0 by chance, have no bound of their own.
            bound = tolerance if case.alike else tolerance / 2
            for one, other in ((mine, out), (kept, state.double())):
                assert float((one - other).norm()) <= bound * float(other.norm())
            continue
        torch.testing.assert_close(mine, out, atol=tolerance, rtol=tolerance)
        tight = TOLERANCE[torch.float32] if exact else tolerance
        torch.testing.assert_close(kept, state.double(), atol=tight, rtol=tight)
    return steps


def bits(op: Op, case: Case, script: Sequence[Step], device: str = "cpu", **options: Any) -> tuple[Tensor, Tensor]:
    """The results and the state of sequence 0 after ``script``."""
    steps = Steps(len(case.rows), case.part_bytes, device)
    got = []
    for pairs, padding, dead in script:
        results = steps.run(op, case.rows, case.constants, case.after, pairs, padding, dead, **options)
        got += [result for result, (sequence, _) in zip(results, pairs) if sequence == 0]
    return torch.cat(got), steps.part(0).clone()


def same_in_any_company(op: Op, case: Case, tokens: int, device: str = "cpu", **options: Any) -> None:
    """What becomes of a sequence must not depend, by a bit, on how it is cut and who is beside it."""
    alone = bits(op, case, [Step([(0, tokens)])], device, **options)
    for script in (
        [Step([(0, tokens - 7)]), Step([(1, 5), (0, 7)])],
        [Step([(1, 9), (0, 1)], 2), *[Step([(0, 1), (2, 1)])] * 2, Step([(2, 17), (0, tokens - 3), (1, 1)])],
    ):
        for one, other in zip(bits(op, case, script, device, **options), alone):
            assert torch.equal(one, other)


def check_captured(op: Op, case: Case, pairs: list[tuple[int, int]]) -> None:
    """Captured for one step, replayed for two that share nothing with it but numbers of tokens and sequences."""
    steps = Steps(3, case.part_bytes, "cuda")
    tokens = sum(count for _, count in pairs)
    fixed = steps.inputs(case.rows, case.constants, [(0, tokens - 2), (1, 1), (2, 1)])
    op(*fixed, *case.after, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(*fixed, *case.after, pdl=True)
    for step in (Step(pairs[::-1]), Step([*pairs[:-1], (pairs[-1][0], 0)], pairs[-1][1])):
        steps.at, expected_memory = [20, 0, 30], torch.randint(0, 63, steps.memory.shape, dtype=torch.uint8).cuda()
        new = steps.inputs(case.rows, case.constants, *step)
        steps.memory.copy_(expected_memory)
        expected = op(*[expected_memory if x is steps.memory else x for x in new], *case.after, pdl=True)
        for mine, theirs in zip(fixed, new):
            if isinstance(mine, torch.Tensor) and mine is not steps.memory:
                mine.copy_(theirs)
        graph.replay()
        assert torch.equal(got, expected)
        assert torch.equal(steps.memory, expected_memory)


def _random(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def delta_rule(
    dtype: torch.dtype, k_heads: int = 1, heads: int = 2, k_dim: int = 16, v_dim: int = 16, by_channel: bool = False,
    l2norm: bool = True, decay: float = 1.0, sequences: int = 3, tokens: int = LONGEST, alike: bool = False,
) -> Case:  # fmt: skip
    """``decay``: how fast states fade; ``alike``: keys that all but repeat, which is hard on triangular solves."""
    randn = _random(k_dim + v_dim)
    rows = []
    for _ in range(sequences):
        q, k, v = (randn(tokens, h, d) for h, d in ((k_heads, k_dim), (k_heads, k_dim), (heads, v_dim)))
        if alike:
            k = k[:1] + 0.05 * k
        if not l2norm:
            k = torch.nn.functional.normalize(k, dim=-1)
        g = -decay * torch.nn.functional.softplus(2 * randn(tokens, heads, *[k_dim] * by_channel))
        # Slices of a wider row, as a fused projection gives.
        together = torch.cat([x.flatten(1) for x in (q, k, v)], 1).to(dtype)
        parts = together.split([k_heads * k_dim, k_heads * k_dim, heads * v_dim], 1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part, dim in zip(parts, (k_dim, k_dim, v_dim)))
        rows.append([q, k, v, g, randn(tokens, heads).sigmoid()])
    part_bytes = 4 * heads * k_dim * v_dim
    return Case(block_steps.delta_rule, rows, [ROW] * 5, [k_dim**-0.5, l2norm], part_bytes, alike=alike)


def ssm_scan(
    dtype: torch.dtype, heads: int = 4, dim: int = 16, groups: int = 2, size: int = 16, skip: bool = True,
    decay: float = 1.0, sequences: int = 3, tokens: int = LONGEST,
) -> Case:  # fmt: skip
    randn = _random(dim + size)
    rows = []
    for _ in range(sequences):
        x, b, c = (randn(tokens, h, d).to(dtype) for h, d in ((heads, dim), (groups, size), (groups, size)))
        rows.append([x, 0.3 * torch.nn.functional.softplus(randn(tokens, heads)), b, c])
    a = -decay * torch.exp(randn(heads))
    constants = [ROW, ROW, a, ROW, ROW, randn(heads) if skip else None]
    return Case(block_steps.ssm_scan, rows, constants, [], 4 * heads * dim * size)


def selective_scan(
    dtype: torch.dtype, channels: int = 40, size: int = 16, skip: bool = True, decay: float = 1.0, sequences: int = 3,
    tokens: int = LONGEST,
) -> Case:  # fmt: skip
    randn = _random(channels + size)
    rows = []
    for _ in range(sequences):
        x, b, c = (randn(tokens, width).to(dtype) for width in (channels, size, size))
        rows.append([x, 0.3 * torch.nn.functional.softplus(randn(tokens, channels)), b, c])
    a = -decay * torch.exp(randn(channels, size))
    constants = [ROW, ROW, a, ROW, ROW, randn(channels) if skip else None]
    return Case(block_steps.selective_scan, rows, constants, [], 4 * channels * size)


def conv1d(
    dtype: torch.dtype, channels: int = 40, taps: int = 4, bias: bool = True, act: str = "silu", sequences: int = 3,
    tokens: int = LONGEST,
) -> Case:  # fmt: skip
    randn = _random(channels + taps)
    rows = [[randn(tokens, channels + 3).to(dtype)[:, 3:]] for _ in range(sequences)]
    constants = [ROW, randn(channels, taps).to(dtype), randn(channels).to(dtype) if bias else None]
    item = rows[0][0].element_size()
    return Case(block_steps.conv1d, rows, constants, [act], item * channels * (taps - 1), dtype)
