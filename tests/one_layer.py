"""A decoder of one layer with one op, run in two chunks: what tests of single ops compare with a plain computation."""

from __future__ import annotations

import torch
from oracle_graph import empty_states
from torch import Tensor
from toy import Toy, load

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.program import Executable, StepInputs
from treadle.graph.spec import Layer, ModelSpec, Op, Sub
from treadle.graph.weights import leaves
from treadle.kernels import registry

T = 21
"""Tokens of the sequence."""


def spec_of(op: Op) -> ModelSpec:
    plain = Toy(windows=(0,)).spec()
    layer = Layer(index=0, subs=(Sub(name="attn", pre=plain.final_norm, op=op),))
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    return ModelSpec(**{**values, "layers": (layer,)})


def run(spec: ModelSpec, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of ``ids`` [T], run in two chunks, and the canonical weights."""
    registry.load_all()
    wanted = {name: item for name, item in expected(spec).items() if item.required}
    graph = build(spec, wanted, BuildOptions(dtype="float32", max_len=64, page_tokens=4))
    weights = load(graph.weights)
    executable = Executable(graph, weights, empty_states(graph, 1, 64))
    rows = []
    for start, end in ((0, 9), (9, T)):
        count = end - start
        rows.append(
            executable.forward(
                StepInputs(
                    token_ids=ids[start:end],
                    positions=torch.arange(start, end),
                    seq_ids=torch.zeros(count, dtype=torch.int32),
                    q_starts=torch.tensor([0, count], dtype=torch.int32),
                    kv_lens=torch.tensor([end], dtype=torch.int32),
                    page_tables=torch.zeros(executable.num_groups, 1, 16, dtype=torch.int32),
                    blocks=torch.zeros(1, dtype=torch.int32),
                    logit_rows=torch.arange(count),
                )
            )
        )
    read = {leaf for expr in graph.weights for leaf in leaves(expr)}
    return torch.cat(rows), {leaf.name: value for leaf, value in load(read).items()}


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight
