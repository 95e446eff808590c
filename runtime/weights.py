"""Loads a program's weights: evaluates weight expressions over a checkpoint, one tensor at a time.

Tensors are read in file order and copied into their final place, so that memory peaks at the result and one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treadle.graph.checkpoint import Checkpoint, CheckpointError
from treadle.graph.expected_weight import Expected
from treadle.graph.position import alibi_slopes, sine_rows
from treadle.graph.rope import rope_rows
from treadle.graph.weights import (
    AlibiSlopes,
    Cast,
    Concat,
    HeadRows,
    Int8,
    Ints,
    Leaf,
    NegativeExp,
    RopeRows,
    Runs,
    SineRows,
    WeightExpr,
    leaves,
)
from treadle.kernels.linear_int8 import quantize_int8

OnProgress = Callable[[int, int], None]
"""Takes the bytes loaded so far and the bytes of all weights."""


def load_weights(
    expressions: Iterable[WeightExpr],
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> dict[WeightExpr, Tensor]:
    """Return a tensor for every expression, contiguous and on ``device``; equal expressions share one.

    Weights that the checkpoint does not read (dummy ones, or missing and allowed) are random, the same for the same
    ``checkpoint.seed`` and name.

    Raises: CheckpointError, SourceError if a tensor cannot be read.
    """
    wanted = list(dict.fromkeys(expressions))
    known, total = set(wanted), sum(expr.nbytes for expr in wanted)
    loader = _Loader(checkpoint, torch.device(device))
    done, loaded = 0, dict[WeightExpr, Tensor]()
    with torch.no_grad():
        for expr in sorted(wanted, key=loader.position):
            if expr in loaded:
                continue
            if isinstance(expr, Int8):
                pair = loader.quantised(expr.part, expr.group)
                both = {Int8(expr.part, expr.group, "weight"): pair[0], Int8(expr.part, expr.group, "scale"): pair[1]}
                made: dict[WeightExpr, Tensor] = {item: tensor for item, tensor in both.items() if item in known}
            else:
                made = {expr: loader.evaluate(expr)}
            for item, tensor in made.items():
                assert tuple(tensor.shape) == item.shape, f"{item.key}: {tuple(tensor.shape)}"
                loaded[item] = tensor
                done += item.nbytes
            if on_progress is not None:
                on_progress(done, total)
    checkpoint.source.close()
    return loaded


class _Loader:
    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._order = {name: index for index, name in enumerate(checkpoint.weights)}

    def position(self, expr: WeightExpr) -> int:
        """Return where the expression's first tensor stands in the files; constants come last."""
        return min((self._order.get(leaf.name, len(self._order)) for leaf in leaves(expr)), default=len(self._order))

    def evaluate(self, expr: WeightExpr) -> Tensor:
        """Return a new tensor."""
        match expr:
            case Leaf() | Concat():
                result = torch.empty(expr.shape, dtype=getattr(torch, expr.dtype), device=self._device)
                for place, part in self.pieces(expr):
                    place(result).copy_(part)
                return result
            case Cast(part=part, dtype=dtype):
                return self.evaluate(part).to(getattr(torch, dtype))
            case NegativeExp(part=part):
                return self.evaluate(part).float().exp().neg_()
            case Runs(runs=runs, dtype=dtype):
                counts, values = (torch.tensor(column) for column in zip(*runs))
                return values.repeat_interleave(counts).to(self._device, getattr(torch, dtype))
            case Int8(part=part, group=group, what=what):
                return self.quantised(part, group)[what == "scale"]
            case HeadRows(part=part, heads=heads, start=start, count=count, turned=turned):
                rows = self.evaluate(part).view(heads, -1, part.shape[1])[:, start : start + count]
                return (rows.transpose(1, 2) if turned else rows).contiguous()
            case RopeRows(table=table, rows=rows, rounding=rounding):
                return rope_rows(table, rows, self._device).to(getattr(torch, rounding)).float()
            case SineRows(dim=dim, rows=rows, endpoint=endpoint, dtype=dtype):
                return sine_rows(dim, rows, endpoint).to(self._device, getattr(torch, dtype))
            case AlibiSlopes(heads=heads, max_bias=max_bias, factor=factor):
                return alibi_slopes(heads, max_bias).mul_(factor).to(self._device)
            case Ints(values=values):
                return torch.tensor(values, dtype=torch.int64, device=self._device)

    def quantised(self, part: WeightExpr, group: int) -> tuple[Tensor, Tensor]:
        """Return int8 values and scales. Rows quantise apart, so what is joined needs no joined matrix before."""
        weight = torch.empty(part.shape, dtype=torch.int8, device=self._device)
        scale = torch.empty(*part.shape[:-1], part.shape[-1] // group, dtype=torch.float32, device=self._device)
        rows = self.pieces(part) if _joins_rows(part) else iter([(_whole, self.evaluate(part))])
        for place, piece in rows:
            # as the program would hold it: rounded to its dtype first
            matrix = piece.to(device=self._device, dtype=getattr(torch, part.dtype))
            values, scales = quantize_int8(matrix.reshape(-1, matrix.shape[-1]), group)
            for target, made in ((place(weight), values), (place(scale), scales)):
                target.copy_(made.view(target.shape))
        return weight, scale

    def pieces(self, expr: WeightExpr) -> Iterator[tuple[Place, Tensor]]:
        """Return ``expr`` part by part, as few bytes at a time as the source allows, and where each part belongs."""
        match expr:
            case Leaf(name=name):
                for index, piece in self._leaf(name):
                    yield (_whole if index is None else partial(Tensor.select, dim=0, index=index)), piece
            case Concat(parts=parts, dim=dim):
                start = 0
                for part in parts:
                    size = part.shape[dim]
                    for place, piece in self.pieces(part):
                        yield partial(_inside, place, dim, start, size), piece
                    start += size
            case _:
                yield _whole, self.evaluate(expr)

    def _leaf(self, name: str) -> Iterator[tuple[int | None, Tensor]]:
        missing = self._checkpoint.initial.get(name)
        if missing is not None:
            yield from random_pieces(
                name, missing, self._checkpoint.seed, self._checkpoint.spec.head.tied, self._device
            )
        elif name in self._checkpoint.weights:
            # the source's tensor may be a view of the mapped file: the program copies it
            yield from self._checkpoint.pieces(name)
        else:
            raise CheckpointError("no such weight", key=name)


Place = Callable[[Tensor], Tensor]
"""Takes a tensor of the shape of an expression, or one that differs in the last dim; returns the view of a part."""


def _whole(x: Tensor) -> Tensor:
    return x


def _inside(place: Place, dim: int, start: int, size: int, x: Tensor) -> Tensor:
    return place(x.narrow(dim, start, size))


def _joins_rows(expr: WeightExpr) -> bool:
    """Return whether the last dim of ``expr`` is whole in each of its parts."""
    match expr:
        case Concat(parts=parts, dim=dim):
            return dim < len(expr.shape) - 1 and all(_joins_rows(part) for part in parts)
        case _:
            return True


def random_pieces(
    name: str, expected: Expected, seed: int, tied: bool, device: torch.device
) -> Iterator[tuple[int | None, Tensor]]:
    """Return a random weight as ``Checkpoint.pieces`` returns a stored one: a stack matrix by matrix."""
    if len(expected.shape) < 3:
        yield None, random_weight(name, expected, seed, tied, device)
        return
    for index in range(expected.shape[0]):
        one = replace(expected, shape=expected.shape[1:])
        yield index, random_weight(f"{name}[{index}]", one, seed, tied, device)


def random_weight(name: str, expected: Expected, seed: int, tied: bool, device: torch.device) -> Tensor:
    """Return a float32 weight that keeps activations near unit variance: a function of seed, name and device."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(expected.shape, dtype=torch.float32, device=device).normal_(generator=generator)
    match expected.kind:
        case "norm":
            return values.mul_(0.1).add_(1.0)
        case "ids":
            # any that are there: the first ones
            return values.copy_(torch.arange(expected.shape[-1]))
        case "norm_minus_one" | "bias":
            return values.mul_(0.1)
        case "embedding" if not tied:
            return values
        case _:
            return values.mul_(expected.shape[-1] ** -0.5)
