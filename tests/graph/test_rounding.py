"""In bfloat16 families round where transformers does: at norms, at scaled embeddings, at rope tables."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from oracle import tiny
from oracle_cases import CASES
from oracle_graph import graph_of, logits, program
from torch import Tensor

from treadle.graph.rope import rope_rows
from treadle.graph.weights import RopeRows
from treadle.runtime.weights import load_weights


@cache
def theirs(name: str) -> Tensor:
    """The logits of all prompts by transformers, everything in bfloat16."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = tiny(name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model.path, dtype=torch.bfloat16, attn_implementation="eager" if name == "gpt-oss" else "sdpa"
        ).eval()
        rows = [loaded(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in model.prompts]
    return torch.cat(rows).float()


def apart(ours: Tensor, reference: Tensor) -> float:
    """Return how far logits are from others, relative to their size: over three quarters of the tokens, the nearest.

    Where rounding turns a router's near tie, a token has other experts and is many times as far, wherever was rounded.
    """
    rows = (ours - reference).norm(dim=-1) / reference.norm(dim=-1)
    return float(rows.sort().values[: len(rows) * 3 // 4].square().mean().sqrt())


def distance(name: str, folder: Path, change: str = "") -> float:
    """Return how far our logits in bfloat16 are from theirs, with a change of the family."""
    (folder / "mine.yaml").write_text(f"extends: {CASES[name].model_type}\n{change}\n")
    model = tiny(name)
    executable = program(model, [folder], "mine", "bfloat16")
    ours = torch.cat([logits(executable, prompt, [len(prompt)]) for prompt in model.prompts]).float()
    return apart(ours, theirs(name))


@pytest.mark.parametrize(
    "name", ["llama", "gemma", "olmo2", "cohere", "qwen3-next", "olmo-hybrid", "nemotron-h", "lfm2"]
)
def test_logits_are_as_near_to_transformers_as_bfloat16_is_to_float32(name: str, tmp_path: Path) -> None:
    exact = torch.cat(tiny(name).logits)
    assert distance(name, tmp_path) < 1.25 * apart(theirs(name), exact)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", "norm: {cast: before}"),
        ("gemma", "norm: {cast: after}"),
        ("gemma", "embed: {scale: 7.95}"),
        ("olmo2", "norm: {cast: after}"),
        ("olmo2", "ops: {attn: {qk_norm: {cast: after}}}"),
        ("helium", "norm: {cast: after}"),
        ("gpt-oss", "norm: {cast: after}"),
        ("flex-olmo", "norm: {cast: after}"),
        ("qwen3-next", "norm: {cast: after}"),
        ("olmo-hybrid", "norm: {cast: after}"),
        ("nemotron-h", "norm: {cast: after}"),
        ("lfm2", "norm: {cast: before}"),
    ],
)
def test_rounding_elsewhere_is_farther_away(name: str, change: str, tmp_path: Path) -> None:
    assert distance(name, tmp_path, change) > 1.05 * distance(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "rounding"), [("llama", "bfloat16"), ("gemma", "bfloat16"), ("cohere", "bfloat16"), ("olmo2", "float32")]
)
def test_rope_tables_are_rounded_as_the_description_says(name: str, rounding: str) -> None:
    checkpoint, graph = graph_of(tiny(name), dtype="bfloat16")
    (rows,) = {expr for expr in graph.weights if isinstance(expr, RopeRows)}
    assert rows.rounding == rounding
    exact = rope_rows(rows.table, rows.rows)
    loaded = load_weights([rows], checkpoint)[rows]
    assert torch.equal(loaded, exact.to(getattr(torch, rounding)).float())
    assert torch.equal(loaded, exact) == (rounding == "float32")
