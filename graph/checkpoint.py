"""From a source's tensors to canonical weights, by the rules of the family, one tensor at a time.

Shapes follow from headers alone, so every mistake (a tensor no rule knows, a weight that no tensor gives, a shape that
does not fit) is found before anything is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treadle.conf.errors import ConfigError
from treadle.graph.expected import expected
from treadle.graph.expected_weight import Expected
from treadle.graph.gguf_types import BLOCK_NAMES
from treadle.graph.mxfp4 import BLOCK, dequantize_mxfp4, scales_name, unpacked_shape
from treadle.graph.source import NUMBERS, PACKED, READABLE, Source
from treadle.graph.spec import ModelSpec, Rule

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointError(ConfigError):
    """A checkpoint that does not fit its family: tensors left over, weights missing, shapes that differ."""


@dataclass(frozen=True)
class WeightInfo:
    """A canonical weight: its shape, and the float dtype that reading it gives."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Piece:
    """One output of one rule for one source tensor."""

    tensor: str
    rule: Rule
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    """absolute sizes along the split dim, when the rule splits"""
    part: int = 0


@dataclass
class _Recipe:
    """The pieces of one canonical weight; several are stacked in order."""

    pieces: dict[int, _Piece] = field(default_factory=dict)
    stacked: bool = False


class Checkpoint:
    """The canonical weights of one model.

    ``weights`` lists them in the order in which the source stores them. Weights that ``allow_missing`` (patterns of
    canonical names) lets be absent are listed too, and are random like those of a dummy source.

    Raises: CheckpointError naming every tensor unused, weight missing and shape that does not fit.
    """

    def __init__(
        self,
        source: Source,
        spec: ModelSpec,
        *,
        allow_unused: Sequence[str] = (),
        allow_missing: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.source, self.spec, self.seed = source, spec, seed
        wanted = expected(spec)
        self.unused: list[str] = []
        """tensors of the source that no weight comes from, and that no rule lets be there"""
        self._recipes: dict[str, _Recipe] = {}
        self.initial: Mapping[str, Expected]
        """weights that are made up instead of read"""
        if source.kind == "dummy":
            self.initial = {name: item for name, item in wanted.items() if item.required}
        else:
            self._map_tensors()
            missing = [name for name, item in wanted.items() if item.required and name not in self._recipes]
            self.initial = {name: wanted[name] for name in missing if _matches(name, allow_missing)}
            self._check(wanted, [name for name in missing if name not in self.initial], allow_unused)
        unknown = [name for name, item in self.initial.items() if -1 in item.shape]
        if unknown:
            raise CheckpointError(_listed("weights whose size only a tensor tells", unknown), key=self._where)
        found = {name: WeightInfo(self._shape(recipe), self._dtype(recipe)) for name, recipe in self._recipes.items()}
        made = {name: WeightInfo(item.shape, "float32") for name, item in self.initial.items()}
        self.weights: Mapping[str, WeightInfo] = found | made

    def read(self, name: str) -> Tensor:
        """Return one canonical weight in a float dtype. Weights in ``initial`` have none: KeyError."""
        import torch

        parts = dict(self.pieces(name))
        return parts[None] if None in parts else torch.stack([parts[index] for index in range(len(parts))])

    def pieces(self, name: str) -> Iterator[tuple[int | None, Tensor]]:
        """Return a weight in parts that lie one behind the other in its first dim, each with its index there.

        A weight that is no stack comes whole, with None. Weights in ``initial`` have none: KeyError.
        """
        recipe = self._recipes[name]
        for index, piece in recipe.pieces.items():
            if recipe.stacked:
                yield index, next(self._read_piece(piece))
            elif len(piece.shape) > 2 and _keeps_first_dim(piece.rule):
                yield from enumerate(self._read_piece(piece, each=True))
            else:
                yield None, next(self._read_piece(piece))

    def _map_tensors(self) -> None:
        rules = [(re.compile(rule.m), rule) for rule in self.spec.rules]
        strip = [re.compile(pattern) for pattern in self.spec.strip]
        problems = []
        for tensor, info in self.source.tensors.items():
            name = tensor
            for prefix in strip:
                name = prefix.sub("", name)
            match, rule = next(((m, r) for p, r in rules if (m := p.fullmatch(name)) and _applies(r, m)), (None, None))
            if match is None or rule is None:
                self.unused.append(tensor)
                continue
            if rule.drop or (rule.quant and scales_name(tensor) is None):
                continue
            try:
                pieces = _pieces(tensor, self._unpacked(tensor, rule), rule)
            except ValueError as error:
                problems.append(f"{tensor} {list(info.shape)}: {error}")
                continue
            for target, piece in pieces:
                self._add(match.expand(target), piece)
        for name, recipe in self._recipes.items():
            gaps = set(range(len(recipe.pieces))) - set(recipe.pieces)
            if gaps:
                problems.append(f"{name} lacks piece {min(gaps)} of {max(recipe.pieces) + 1}")
        if problems:
            raise CheckpointError(_listed("tensors do not fit the rules of the family", problems), key=self._where)

    def _unpacked(self, tensor: str, rule: Rule) -> tuple[int, ...]:
        """Return the shape of a tensor as the transforms of its rule see it. Raises ValueError if it cannot be."""
        info = self.source.tensors[tensor]
        if not rule.quant:
            return info.shape
        shape = unpacked_shape(tensor, info.shape)
        scales = self.source.tensors.get(scales_name(tensor) or "")
        wanted = (*shape[:-1], shape[-1] // BLOCK)
        if scales is None or scales.shape != wanted or {scales.dtype, info.dtype} != {PACKED}:
            raise ValueError(f"needs {scales_name(tensor)} {list(wanted)}, both of {PACKED}")
        return shape

    def _add(self, target: str, piece: _Piece) -> None:
        stacked = re.fullmatch(r"(.*)\[(\d+)\]", target)
        name, index = (stacked[1], int(stacked[2])) if stacked else (target, 0)
        recipe = self._recipes.setdefault(name, _Recipe(stacked=stacked is not None))
        if index in recipe.pieces:
            raise CheckpointError(
                f"two tensors give {target}: {recipe.pieces[index].tensor}, {piece.tensor}", key=self._where
            )
        recipe.pieces[index] = piece

    def _check(self, wanted: Mapping[str, Expected], missing: list[str], allow_unused: Sequence[str]) -> None:
        # a tied head may be stored all the same; anything else that nobody reads is a mistake
        ignored = {"head.weight"} if self.spec.head.tied else set()
        self.unused += [
            piece.tensor
            for name, recipe in self._recipes.items()
            if name not in wanted and name not in ignored
            for piece in recipe.pieces.values()
        ]
        unread = [tensor for tensor in self.unused if not _matches(tensor, allow_unused)]
        for name in [name for name in self._recipes if name not in wanted]:
            del self._recipes[name]
        problems = []
        if missing:
            problems.append(_listed("weights that no tensor gives", missing))
        if unread:
            problems.append(_listed("tensors that nothing reads", unread))
        wrong = [
            f"{name} is {list(shape)}, config.json makes it {list(item.shape)}"
            for name, item in wanted.items()
            if name in self._recipes and not _fits(shape := self._shape(self._recipes[name]), item.shape)
        ]
        if wrong:
            # What does not fit in one layer mostly fits in none.
            problems.append(_listed("shapes that do not fit", wrong, shown=3))
        unreadable = [
            f"{piece.tensor} is {dtype}"
            for name, recipe in self._recipes.items()
            for piece in recipe.pieces.values()
            if (dtype := self.source.tensors[piece.tensor].dtype)
            not in (NUMBERS if wanted[name].kind == "ids" else READABLE)
            and dtype not in BLOCK_NAMES
            and not piece.rule.quant
        ]
        if unreadable:
            problems.append(_listed("element types that cannot be read", unreadable))
        if problems:
            hint = "model.allow_unused and model.allow_missing take regular expressions" if missing or unread else ""
            raise CheckpointError("; ".join(problems), key=self._where, hint=hint)

    @property
    def _where(self) -> str | None:
        return str(self.source.path) if self.source.path is not None else None

    def _shape(self, recipe: _Recipe) -> tuple[int, ...]:
        shape = recipe.pieces[0].shape
        return (len(recipe.pieces), *shape) if recipe.stacked else shape

    def _dtype(self, recipe: _Recipe) -> str:
        dtype = self.source.tensors[recipe.pieces[0].tensor].dtype
        return dtype if dtype in READABLE else "float32"

    def _read_piece(self, piece: _Piece, *, each: bool = False) -> Iterator[Tensor]:
        """Return what a tensor gives, or with ``each`` what every index of its first dim gives, one after the other."""
        x = self.source.read(piece.tensor)
        scales = scales_name(piece.tensor) if piece.rule.quant else None
        s = self.source.read(scales) if scales else None
        for i in range(len(x)) if each else (None,):
            part = x if i is None else x[i : i + 1]
            if s is not None:
                part = dequantize_mxfp4(part, s if i is None else s[i : i + 1])
            made = _transform(part, piece)
            yield made if i is None else made[0]


def _transform(x: Tensor, piece: _Piece) -> Tensor:
    rule = piece.rule
    if rule.t:
        x = x.transpose(-1, -2)
    if rule.scale is not None:
        x = x * rule.scale
    if rule.reshape is not None:
        x = x.reshape(rule.reshape)
    if rule.gsplit is not None:
        dim, groups = rule.gsplit.dim, rule.gsplit.groups
        grouped = x.reshape(*x.shape[:dim], groups, sum(piece.sizes), *x.shape[dim + 1 :])
        start = sum(piece.sizes[: piece.part])
        part = grouped.narrow(dim + 1, start, piece.sizes[piece.part])
        x = part.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return x.transpose(-1, -2) if rule.post_t else x


def _keeps_first_dim(rule: Rule) -> bool:
    """Return whether what a rule makes of one index of the first dim hangs on that index alone."""
    return rule.reshape is None and (rule.gsplit is None or rule.gsplit.dim > 0)


def _applies(rule: Rule, match: re.Match[str]) -> bool:
    return rule.layers is None or int(match[1]) in rule.layers


def _pieces(tensor: str, shape: tuple[int, ...], rule: Rule) -> Iterable[tuple[str, _Piece]]:
    """Return target and piece for every output of a rule. Raises ValueError if the shape does not allow it."""
    if rule.t:
        shape = _transposed(shape)
    if rule.reshape is not None:
        shape = _reshaped(shape, rule.reshape)
    if rule.gsplit is None:
        assert rule.to is not None
        return [(rule.to, _Piece(tensor, rule, _transposed(shape) if rule.post_t else shape))]
    split = rule.gsplit
    total, rest = divmod(shape[split.dim], split.groups)
    if rest or total % sum(split.sizes):
        raise ValueError(f"dim {split.dim} does not split into {split.groups} groups of {list(split.sizes)}")
    sizes = tuple(size * total // sum(split.sizes) for size in split.sizes)
    result = []
    for part, target in enumerate(split.to):
        if target:
            made = (*shape[: split.dim], sizes[part] * split.groups, *shape[split.dim + 1 :])
            result.append((target, _Piece(tensor, rule, _transposed(made) if rule.post_t else made, sizes, part)))
    return result


def _reshaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``wanted``, in which one -1 stands for what is left. Raises ValueError if sizes do not allow it."""
    total, known = math.prod(shape), math.prod(size for size in wanted if size != -1)
    open_sizes = wanted.count(-1)
    if known < 1 or open_sizes > 1 or total % known or (total != known and not open_sizes):
        raise ValueError(f"cannot become {list(wanted)}")
    return tuple(total // known if size == -1 else size for size in wanted)


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        raise ValueError("cannot be transposed")
    return (*shape[:-2], shape[-1], shape[-2])


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(b in (a, -1) for a, b in zip(shape, wanted))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _listed(title: str, names: Sequence[str], shown: int = 10) -> str:
    text = ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
    return f"{len(names)} {title}: {text}"
