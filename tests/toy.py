"""A small decoder described in code, and random weights for it: what tests of graphs and passes run on."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treadle.graph.build import BuildOptions, build
from treadle.graph.ir import Graph
from treadle.graph.spec import Attention, Embed, Head, Layer, Mlp, ModelSpec, Moe, Norm, QKNorm, RopeTable, Sub
from treadle.graph.text import body_text
from treadle.graph.weights import Cast, Concat, HeadRows, Int8, Ints, Leaf, RopeRows, WeightExpr
from treadle.kernels.linear_int8 import quantize_int8

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, DIM = 96, 64, 96, 4, 2, 16


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Options of the toy; each makes a graph of another form."""

    windows: Sequence[int] = (0, 0, 0)
    qk_norm: QKNorm | None = None
    bias: bool = False
    tied: bool = True
    post: bool = False
    plus_one: bool = False
    softcap: float = 0.0
    gated: bool = True
    norm: Norm = field(default_factory=lambda: Norm(eps=1e-5))
    moe: Moe | None = None

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="toy",
            hidden=HIDDEN,
            vocab=VOCAB,
            max_positions=128,
            embed=Embed(scale=1.5),
            final_norm=self.norm,
            head=Head(tied=self.tied, softcap=self.softcap),
            layers=tuple(Layer(index=i, subs=self._subs(window)) for i, window in enumerate(self.windows)),
            rules=(),
        )

    def _subs(self, window: int) -> tuple[Sub, ...]:
        post = self.norm if self.post else None
        attention = Attention(
            heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, window=window, rope=RopeTable(dim=DIM), qk_norm=self.qk_norm,
            softcap=self.softcap,
        )  # fmt: skip
        mlp = self.moe or Mlp(gated=self.gated)
        return (
            Sub(name="attn", pre=self.norm, post=post, op=attention),
            Sub(name="mlp", pre=self.norm, post=post, op=mlp),
        )

    def tensors(self) -> dict[str, Shape]:
        sizes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "final_norm.weight": (HIDDEN,)}
        if not self.tied:
            sizes["head.weight"] = (VOCAB, HIDDEN)
        for i in range(len(self.windows)):
            rows = {
                "attn.q": (HEADS * DIM, HIDDEN),
                "attn.k": (KV_HEADS * DIM, HIDDEN),
                "attn.v": (KV_HEADS * DIM, HIDDEN),
            }
            rows["attn.o"] = (HIDDEN, HEADS * DIM)
            if self.moe is not None:
                count = self.moe.experts
                rows["mlp.router"] = (count, HIDDEN)
                stacks = {"gate": (count, FFN, HIDDEN), "up": (count, FFN, HIDDEN), "down": (count, HIDDEN, FFN)}
                sizes |= {f"layers.{i}.mlp.{name}": shape for name, shape in stacks.items()}
            else:
                rows |= {"mlp.up": (FFN, HIDDEN), "mlp.down": (HIDDEN, FFN)}
                if self.gated:
                    rows["mlp.gate"] = (FFN, HIDDEN)
            for name, shape in rows.items():
                sizes[f"layers.{i}.{name}.weight"] = shape
                if self.bias:
                    sizes[f"layers.{i}.{name}.bias"] = shape[:1]
            for name in ("attn.pre", "mlp.pre", *(("attn.post", "mlp.post") if self.post else ())):
                sizes[f"layers.{i}.{name}.weight"] = (HIDDEN,)
            if self.qk_norm is not None:
                full = self.qk_norm.scope == "full"
                sizes[f"layers.{i}.attn.q_norm.weight"] = (HEADS * DIM if full else DIM,)
                sizes[f"layers.{i}.attn.k_norm.weight"] = (KV_HEADS * DIM if full else DIM,)
        return {name: Shape(shape) for name, shape in sizes.items()}

    def graph(self, dtype: str = "float32", page_tokens: int = 4) -> Graph:
        return build(self.spec(), self.tensors(), BuildOptions(dtype=dtype, max_len=64, page_tokens=page_tokens))


def load(expressions: Iterable[WeightExpr]) -> dict[WeightExpr, Tensor]:
    """Random weights: the same expression is always the same tensor."""
    return {expr: _evaluate(expr) for expr in expressions}


def _evaluate(expr: WeightExpr) -> Tensor:
    match expr:
        case Leaf():
            generator = torch.Generator().manual_seed(zlib.crc32(expr.name.encode()))
            value = torch.randn(expr.shape, generator=generator)
            value = value / expr.shape[-1] ** 0.5 if len(expr.shape) > 1 else 1 + 0.2 * value
            return value.to(getattr(torch, expr.dtype))
        case Concat():
            return torch.cat([_evaluate(part) for part in expr.parts], expr.dim)
        case Int8():
            whole = _evaluate(expr.part)
            weight, scale = quantize_int8(whole.flatten(0, -2), expr.group)
            return (weight if expr.what == "weight" else scale).view(expr.shape)
        case Cast():
            return _evaluate(expr.part).to(getattr(torch, expr.dtype))
        case HeadRows():
            rows = _evaluate(expr.part).unflatten(0, (expr.heads, -1))[:, expr.start : expr.start + expr.count]
            return rows.transpose(1, 2).contiguous() if expr.turned else rows.contiguous()
        case RopeRows():
            dim, theta = expr.table.dim, expr.table.theta
            angles = torch.outer(torch.arange(expr.rows).float(), theta ** (-torch.arange(0, dim, 2).float() / dim))
            return torch.cat([angles.cos(), angles.sin()], -1)
        case Ints():
            return torch.tensor(expr.values)


def lines(graph: Graph, body: str = "layer0") -> list[str]:
    """The calls of a body as printed, without types: what Before / Expected tests compare."""
    text = body_text(graph.bodies[body], graph)
    return [line.split("  #")[0].strip() for line in text.partition("):\n")[2].splitlines()][:-1]
