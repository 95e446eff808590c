"""MODEL-level graphs of the oracle's checkpoints: what they compute must be what transformers computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from oracle import Tiny
from torch import Tensor

from treadle.graph.build import BuildOptions, build
from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import family_for, load_spec
from treadle.graph.ir import Graph
from treadle.graph.program import Executable, StepInputs
from treadle.graph.source import open_source
from treadle.graph.state import BLOCK, Slot
from treadle.kernels import registry
from treadle.runtime.weights import load_weights

LENGTH = 128


def graph_of(
    model: Tiny, search: Sequence[Path] = (), family: str = "", dtype: str = "float32"
) -> tuple[Checkpoint, Graph]:
    """Return a checkpoint and its MODEL-level graph for sequences of up to LENGTH tokens."""
    source = open_source(model.path)
    spec = load_spec(family or family_for(source.config, search), source.config, search)
    checkpoint = Checkpoint(source, spec)
    return checkpoint, build(spec, checkpoint.weights, BuildOptions(dtype=dtype, max_len=LENGTH, page_tokens=4))


def program(model: Tiny, search: Sequence[Path] = (), family: str = "", dtype: str = "float32") -> Executable:
    """Return that graph, ready to run one sequence."""
    registry.load_all()
    checkpoint, graph = graph_of(model, search, family, dtype)
    return Executable(graph, load_weights(graph.weights, checkpoint), empty_states(graph, 1, LENGTH))


def empty_states(graph: Graph, sequences: int, length: int) -> dict[Slot, Tensor]:
    """Return what a MODEL-level graph keeps of sequences that have not begun; nothing may read their blocks: poison."""
    states: dict[Slot, Tensor] = {}
    for number, group in enumerate(graph.state.groups):
        for index, kv in enumerate(group.layers):
            shape = (sequences, length, kv.kv_heads, kv.k_dim + kv.v_dim)
            states[Slot(number, index)] = torch.zeros(shape, dtype=graph.dtype)
    for index, part in enumerate(graph.state.block.parts if graph.state.block is not None else ()):
        states[Slot(BLOCK, index)] = torch.full((sequences, part.nbytes), 0xFF, dtype=torch.uint8)
    return states


def logits(executable: Executable, ids: list[int], chunks: list[int]) -> Tensor:
    """Return the logits of every token, computed chunk by chunk."""
    rows, start = [], 0
    for size in chunks:
        end = start + size
        step = StepInputs(
            token_ids=torch.tensor(ids[start:end]),
            positions=torch.arange(start, end),
            seq_ids=torch.zeros(size, dtype=torch.int32),
            q_starts=torch.tensor([0, size], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
            page_tables=torch.zeros(executable.num_groups, 1, LENGTH // 4, dtype=torch.int32),
            blocks=torch.zeros(1, dtype=torch.int32),
            logit_rows=torch.arange(size),
        )
        rows.append(executable.forward(step))
        start = end
    return torch.cat(rows)


def check(model: Tiny, search: Sequence[Path] = ()) -> None:
    """Compare logits of prompts and greedy tokens, in two chunks and then one by one."""
    executable = program(model, search)
    for prompt, tokens, expected in zip(model.prompts, model.tokens, model.logits):
        whole = prompt + tokens
        first = len(prompt) // 2 + 1
        made = logits(executable, whole, [first, len(prompt) - first, *[1] * len(tokens)])
        torch.testing.assert_close(made[: len(prompt)], expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        assert made[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
