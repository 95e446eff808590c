"""Loads a program's weights: evaluates weight expressions over a checkpoint, one tensor at a time.

Tensors are read in file order and copied into their final place, so that memory peaks at the result and one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from treadle.graph.checkpoint import Checkpoint, CheckpointError
from treadle.graph.expected import Expected
from treadle.graph.position import alibi_slopes, sine_rows
from treadle.graph.rope import rope_rows
from treadle.graph.weights import AlibiSlopes, Cast, Concat, Int8, Ints, Leaf, RopeRows, SineRows, WeightExpr, leaves
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
            case Leaf(name=name, dtype=dtype):
                return self._leaf(name, getattr(torch, dtype))
            case Concat(parts=parts, dim=dim):
                return self._joined(
                    parts, dim, torch.empty(expr.shape, dtype=getattr(torch, expr.dtype), device=self._device)
                )
            case Cast(part=part, dtype=dtype):
                return self.evaluate(part).to(getattr(torch, dtype))
            case Int8(part=part, group=group, what=what):
                return self.quantised(part, group)[what == "scale"]
            case RopeRows(table=table, rows=rows, rounding=rounding):
                return rope_rows(table, rows, self._device).to(getattr(torch, rounding)).float()
            case SineRows(dim=dim, rows=rows, endpoint=endpoint, dtype=dtype):
                return sine_rows(dim, rows, endpoint).to(self._device, getattr(torch, dtype))
            case AlibiSlopes(heads=heads, max_bias=max_bias, factor=factor):
                return alibi_slopes(heads, max_bias).mul_(factor).to(self._device)
            case Ints(values=values):
                return torch.tensor(values, dtype=torch.int64, device=self._device)

    def quantised(self, part: WeightExpr, group: int) -> tuple[Tensor, Tensor]:
        """Return int8 values and scales. Rows quantise apart, so joined rows need no joined matrix before."""
        if not (isinstance(part, Concat) and part.dim == 0):
            return quantize_int8(self.evaluate(part), group)
        weight = torch.empty(part.shape, dtype=torch.int8, device=self._device)
        scale = torch.empty(part.shape[0], part.shape[1] // group, dtype=torch.float32, device=self._device)
        start = 0
        for item in part.parts:
            rows = item.shape[0]
            values, scales = self.quantised(item, group)
            weight[start : start + rows].copy_(values)
            scale[start : start + rows].copy_(scales)
            start += rows
        return weight, scale

    def _joined(self, parts: Sequence[WeightExpr], dim: int, result: Tensor) -> Tensor:
        start = 0
        for part in parts:
            result.narrow(dim, start, part.shape[dim]).copy_(self.evaluate(part))
            start += part.shape[dim]
        return result

    def _leaf(self, name: str, dtype: torch.dtype) -> Tensor:
        missing = self._checkpoint.initial.get(name)
        if missing is not None:
            tied = self._checkpoint.spec.head.tied
            return random_weight(name, missing, self._checkpoint.seed, tied, self._device).to(dtype)
        if name not in self._checkpoint.weights:
            raise CheckpointError("no such weight", key=name)
        # the source's tensor may be a view of the mapped file: the copy is the program's own
        result = torch.empty(self._checkpoint.weights[name].shape, dtype=dtype, device=self._device)
        return result.copy_(self._checkpoint.read(name))


def random_weight(name: str, expected: Expected, seed: int, tied: bool, device: torch.device) -> Tensor:
    """Return a float32 weight that keeps activations near unit variance: a function of seed, name and device."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(expected.shape, dtype=torch.float32, device=device).normal_(generator=generator)
    match expected.kind:
        case "norm":
            return values.mul_(0.1).add_(1.0)
        case "norm_minus_one" | "bias":
            return values.mul_(0.1)
        case "embedding" if not tied:
            return values
        case _:
            return values.mul_(expected.shape[-1] ** -0.5)
