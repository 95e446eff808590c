"""Steps of ops with a block state: sequences at any point of their life, and what the ops mean, a token at a time.

A history of tokens belongs to each sequence. A step takes some of each, from where the last one ended; blocks lie in an
arena in random order, with NaN wherever nothing was written and in every row that nobody owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

UNIT = 256
Op = Callable[..., Tensor]


class Steps:
    """``count`` sequences, each with ``part_bytes`` of state at ``offset`` of its block; all at position 0."""

    def __init__(self, count: int, part_bytes: int, device: str = "cpu", seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.device = device
        self.part_bytes = part_bytes
        self.offset = 2 * UNIT
        units = 3 + -(-part_bytes // UNIT)
        self.memory = torch.full(((count + 1) * units * UNIT,), 0xFF, dtype=torch.uint8, device=device)
        self.blocks = (torch.randperm(count, generator=self.random) * units + 1).tolist()
        self.at = [0] * count

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def part(self, sequence: int) -> Tensor:
        begin = self.blocks[sequence] * UNIT + self.offset
        return self.memory[begin : begin + self.part_bytes]

    def inputs(
        self, rows: Sequence[Sequence[Tensor]], constants: Sequence[Any], step: Sequence[tuple[int, int]],
        padding: int = 0, dead: Sequence[int] = (),
    ) -> list[Any]:  # fmt: skip
        """The arguments of a step, up to the state: pairs (sequence, tokens), which move on.

        ``rows[sequence]`` are those with a row a token, for the whole history; ``constants`` all of them, with ROW for
        those. ``dead`` are the pairs whose sequence has ended; ``padding`` rows follow.
        """
        flat, positions, lengths = [], [], []
        for index, (sequence, tokens) in enumerate(step):
            at = self.at[sequence]
            poison = index in dead
            flat.append([_poisoned(x[at : at + tokens], poison) for x in rows[sequence]])
            positions += [-1] * tokens if poison else list(range(at, at + tokens))
            lengths.append(0 if poison else at + tokens)
            self.at[sequence] += 0 if poison else tokens
        flat.append([_poisoned(x[:1].expand(padding, *x.shape[1:]), True) for x in rows[0]])
        positions += [-1] * padding
        together = [torch.cat(each).to(self.device) for each in zip(*flat)]
        starts = [0, *accumulate(tokens for _, tokens in step)]
        ints = [torch.tensor(x, dtype=torch.int32, device=self.device) for x in (
            [self.blocks[sequence] for sequence, _ in step], starts, lengths,
        )]  # fmt: skip
        where = torch.tensor(positions, dtype=torch.int64, device=self.device)
        offset = torch.tensor([self.offset], dtype=torch.int64, device=self.device)
        fixed = [x.to(self.device) if isinstance(x, Tensor) else x for x in constants]
        return [*merge(together, fixed), self.memory, ints[0], offset, ints[1], where, ints[2]]

    def run(
        self, op: Op, rows: Sequence[Sequence[Tensor]], constants: Sequence[Any], after: Sequence[Any],
        step: Sequence[tuple[int, int]], padding: int = 0, dead: Sequence[int] = (), **options: Any,
    ) -> list[Tensor]:  # fmt: skip
        """Run a step, and return the results of each pair; all others must be zeros. ``after``: the last arguments."""
        out = op(*self.inputs(rows, constants, step, padding, dead), *after, **options)
        starts = [0, *accumulate(tokens for _, tokens in step)]
        results = [out[begin:end].cpu() for begin, end in pairwise(starts)]
        assert not out[starts[-1] :].count_nonzero(), "padding is not zero"
        assert not any(results[index].count_nonzero() for index in dead), "rows of ended sequences are not zero"
        return results


def merge(rows: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
    """The arguments of an op: ``constants`` with ROW replaced by the next of ``rows``."""
    following = iter(rows)
    return [next(following) if value is ROW else value for value in constants]


ROW = object()
"""Stands among constants for an argument with a row a token."""


def _poisoned(x: Tensor, poison: bool) -> Tensor:
    return torch.full_like(x, float("nan")) if poison else x


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, l2norm: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results and the last state of one sequence from its start, in fp64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    q, k = (q * scale).repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    out = torch.empty(v.shape, dtype=torch.float64)
    for t in range(len(v)):
        state = state * g[t].exp().reshape(len(state), -1, 1)
        change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * change[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out, state


def ssm_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results and the last state of one sequence from its start, in fp64."""
    x, dt, a, b, c = (each.double() for each in (x, dt, a, b, c))
    b, c = (each.repeat_interleave(x.shape[1] // b.shape[1], 1) for each in (b, c))
    state = torch.zeros(*x.shape[1:], b.shape[2], dtype=torch.float64)
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        state = state * (dt[t] * a).exp()[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        out[t] = torch.einsum("hpn,hn->hp", state, c[t])
    return (out if d is None else out + x * d.double()[:, None]), state


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results and the last state of one sequence from its start, in fp64."""
    x, dt, a, b, c = (each.double() for each in (x, dt, a, b, c))
    state = torch.zeros(a.shape, dtype=torch.float64)
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        state = state * (dt[t][:, None] * a).exp() + (dt[t] * x[t])[:, None] * b[t]
        out[t] = state @ c[t]
    return (out if d is None else out + x * d.double()), state


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    """The results, in fp64, and the last state, in x's dtype, of one sequence from its start."""
    taps = weight.shape[1]
    behind = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    out = sum(behind[j : j + len(x)].double() * weight[:, j].double() for j in range(taps))
    out = out if bias is None else out + bias.double()
    return (torch.nn.functional.silu(out) if act == "silu" else out), behind[len(x) :]
