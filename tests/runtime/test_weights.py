"""Weight expressions load to the tensors that they describe, once each, in little more memory than the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import tiny
from safetensors.torch import save_file
from torch import Tensor

from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import load_spec
from treadle.graph.rope import rope_rows
from treadle.graph.source import DummySource, open_source
from treadle.graph.spec import RopeTable
from treadle.graph.weights import Cast, Concat, Int8, Ints, Leaf, NegativeExp, RopeRows, Runs, WeightExpr, leaves
from treadle.kernels.linear_int8 import quantize_int8
from treadle.runtime.weights import load_weights


@pytest.fixture
def checkpoint() -> Checkpoint:
    source = open_source(tiny("llama").path)
    return Checkpoint(source, load_spec("llama", source.config))


def dummy(seed: int = 0, family: str = "llama", **config: object) -> Checkpoint:
    source = DummySource({**tiny("llama").config, **config})
    return Checkpoint(source, load_spec(family, source.config), seed=seed)


def leaf(checkpoint: Checkpoint, name: str, dtype: str = "float32") -> Leaf:
    return Leaf(name, checkpoint.weights[name].shape, dtype)


def part(name: str) -> str:
    return f"layers.1.attn.{name}.weight"


def load(checkpoint: Checkpoint, expr: WeightExpr) -> Tensor:
    return load_weights([expr], checkpoint)[expr]


def test_leaf_is_the_tensor_of_the_file(checkpoint: Checkpoint) -> None:
    stored = checkpoint.source.read("model.layers.1.self_attn.q_proj.weight")
    assert torch.equal(load(checkpoint, leaf(checkpoint, part("q"))), stored)
    half = load(checkpoint, leaf(checkpoint, part("q"), "bfloat16"))
    assert torch.equal(half, stored.bfloat16())


def test_concat_joins_in_order(checkpoint: Checkpoint) -> None:
    parts = tuple(leaf(checkpoint, part(name), "bfloat16") for name in "qkv")
    made = load(checkpoint, Concat(parts))
    assert torch.equal(made, torch.cat([load(checkpoint, item) for item in parts]))
    o, down = leaf(checkpoint, part("o")), leaf(checkpoint, "layers.1.mlp.down.weight")
    assert torch.equal(
        load(checkpoint, Concat((o, down), 1)), torch.cat([load(checkpoint, o), load(checkpoint, down)], 1)
    )


def test_cast_rounds_the_part_first(checkpoint: Checkpoint) -> None:
    half = leaf(checkpoint, part("q"), "bfloat16")
    assert torch.equal(load(checkpoint, Cast(half, "float32")), load(checkpoint, half).float())


def test_int8_of_joined_rows_is_int8_of_the_joined_matrix(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Concat(tuple(leaf(checkpoint, part(name), "bfloat16") for name in "qkv"))
    weight, scale = Int8(joined, 32, "weight"), Int8(joined, 32, "scale")
    calls = []

    def counted(matrix: Tensor, group: int) -> tuple[Tensor, Tensor]:
        calls.append(matrix.shape)
        return quantize_int8(matrix, group)

    monkeypatch.setattr("treadle.runtime.weights.quantize_int8", counted)
    made = load_weights([scale, weight], checkpoint)
    expected = quantize_int8(load(checkpoint, joined), 32)
    assert torch.equal(made[weight], expected[0])
    assert torch.equal(made[scale], expected[1])
    assert len(calls) == 3, "each part once, for values and scales together"
    columns = Int8(Concat((leaf(checkpoint, part("o")), leaf(checkpoint, part("q"))), 1), 32)
    assert torch.equal(load(checkpoint, columns), quantize_int8(load(checkpoint, columns.part), 32)[0])


def test_a_stack_of_experts_is_filled_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(tiny("mixtral").path)
    made = Checkpoint(source, load_spec("mixtral", source.config))
    gate, up = (leaf(made, f"layers.1.mlp.{name}", "bfloat16") for name in ("gate", "up"))
    both = Concat((gate, up), 1)
    monkeypatch.setattr(torch, "stack", None)  # no tensor of all pieces is ever made
    found = load(made, both)
    for expert in range(gate.shape[0]):
        stored = [
            source.read(f"model.layers.1.block_sparse_moe.experts.{expert}.w{part}.weight").bfloat16()
            for part in (1, 3)
        ]
        assert torch.equal(found[expert], torch.cat(stored))
    loaded = load_weights([Int8(both, 32), Int8(both, 32, "scale")], made)
    codes, scales = quantize_int8(found.view(-1, found.shape[-1]), 32)
    assert torch.equal(loaded[Int8(both, 32)].view(codes.shape), codes)
    assert torch.equal(loaded[Int8(both, 32, "scale")].view(scales.shape), scales)


def test_random_stacks_differ_by_expert() -> None:
    config = {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 96}
    made = dummy(family="mixtral", **config)
    stack = load(made, leaf(made, "layers.0.mlp.up"))
    assert stack.shape == (4, 96, 64)
    assert not torch.equal(stack[0], stack[1])
    assert float(stack.std()) == pytest.approx(64**-0.5, rel=0.1)


def test_constants(checkpoint: Checkpoint) -> None:
    table = RopeTable(dim=8)
    assert torch.equal(load(checkpoint, RopeRows(table, 12)), rope_rows(table, 12))
    made = load(checkpoint, Ints((3, -4)))
    assert (made.tolist(), made.dtype) == ([3, -4], torch.int64)
    made = load(checkpoint, Runs(((2, 0.5), (1, -3.0)), "bfloat16"))
    assert (made.tolist(), made.dtype) == ([0.5, 0.5, -3.0], torch.bfloat16)


def test_rates_of_decay_are_made_of_their_logarithms(checkpoint: Checkpoint) -> None:
    logs = leaf(checkpoint, "final_norm.weight", "float32")
    assert torch.equal(load(checkpoint, NegativeExp(logs)), -load(checkpoint, logs).exp())
    assert leaves(NegativeExp(logs)) == (logs,)


def test_equal_expressions_are_loaded_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    pieces = checkpoint.pieces
    monkeypatch.setattr(checkpoint, "pieces", lambda name: reads.append(name) or pieces(name))
    names = [part(name) for name in "vqk"]
    made = load_weights([leaf(checkpoint, name) for name in [*names, *names]], checkpoint)
    assert len(made) == 3
    order = list(checkpoint.weights)
    assert reads == sorted(names, key=order.index), "in the order of the file"


def test_every_loaded_tensor_has_the_planned_type(checkpoint: Checkpoint) -> None:
    joined = Concat((leaf(checkpoint, part("k")), leaf(checkpoint, part("v"))))
    exprs: list[WeightExpr] = [
        joined,
        leaf(checkpoint, "final_norm.weight", "float16"),
        Cast(joined, "bfloat16"),
        Int8(joined, 16, "scale"),
        Int8(joined, 16),
        RopeRows(RopeTable(dim=8), 3),
        Ints((1,)),
        NegativeExp(leaf(checkpoint, "final_norm.weight", "float32")),
        Runs(((3, 1.0),), "bfloat16"),
    ]
    for expr, tensor in load_weights(exprs, checkpoint).items():
        assert (tuple(tensor.shape), str(tensor.dtype)[6:]) == (expr.shape, expr.dtype)
        assert tensor.nbytes == expr.nbytes
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == expr.nbytes, "no view of something larger"
    assert len({expr.key for expr in exprs}) == len(exprs)


def test_leaves_are_in_reading_order(checkpoint: Checkpoint) -> None:
    q, k = leaf(checkpoint, part("q")), leaf(checkpoint, part("k"))
    assert leaves(Int8(Concat((q, k)), 32)) == (q, k)
    assert leaves(Ints((1,))) == ()


def test_parts_that_do_not_join_are_an_internal_mistake(checkpoint: Checkpoint) -> None:
    with pytest.raises(AssertionError, match="do not join"):
        Concat((leaf(checkpoint, part("q")), leaf(checkpoint, "layers.1.mlp.down.weight")))
    with pytest.raises(AssertionError, match="different dtypes"):
        Concat((leaf(checkpoint, part("q")), leaf(checkpoint, part("k"), "bfloat16")))
    with pytest.raises(AssertionError, match="do not divide"):
        Int8(leaf(checkpoint, part("q")), 7)


def test_progress_ends_at_the_total(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    exprs = [leaf(checkpoint, name) for name in checkpoint.weights]
    load_weights(exprs, checkpoint, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (sum(expr.nbytes for expr in exprs),) * 2


def test_dummy_weights_are_fixed_by_seed_and_name() -> None:
    first, again, other = dummy(), dummy(), dummy(seed=1)
    for name in (part("q"), "final_norm.weight"):
        assert torch.equal(load(first, leaf(first, name)), load(again, leaf(again, name)))
        assert not torch.equal(load(first, leaf(first, name)), load(other, leaf(other, name)))
    assert not torch.equal(load(first, leaf(first, part("k"))), load(first, leaf(first, part("v"))))


def test_dummy_weights_keep_activations_near_one() -> None:
    made = dummy()
    matrix = load(made, leaf(made, "layers.0.mlp.down.weight"))
    assert float(matrix.std()) == pytest.approx(96**-0.5, rel=0.1)
    assert float(load(made, leaf(made, "final_norm.weight")).mean()) == pytest.approx(1.0, abs=0.1)
    gemma = dummy(family="gemma", tie_word_embeddings=True)
    assert float(load(gemma, leaf(gemma, "final_norm.weight")).mean()) == pytest.approx(0.0, abs=0.1)
    assert float(load(gemma, leaf(gemma, "embed.weight")).std()) == pytest.approx(64**-0.5, rel=0.1)


def test_allowed_missing_weights_are_made_up() -> None:
    source = open_source(tiny("llama").path)
    spec = load_spec("llama", {**source.config, "attention_bias": True})
    made = Checkpoint(source, spec, allow_missing=[r".*\.bias"])
    name = "layers.0.attn.q.bias"
    assert 0 < float(load(made, leaf(made, name)).abs().max()) < 1


PEAK = """
import json, resource, sys
from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import load_spec
from treadle.graph.source import open_source
from treadle.graph.weights import Concat, Leaf
from treadle.runtime.weights import load_weights

def peak():
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0) * 1024

source = open_source(sys.argv[1])
checkpoint = Checkpoint(source, load_spec("llama", source.config))
names = [[f"layers.{i}.mlp.{part}.weight" for part in ("gate", "up")] for i in range(4)]
exprs = [Concat(tuple(Leaf(name, checkpoint.weights[name].shape, "float32") for name in pair)) for pair in names]
load_weights(exprs[:1], checkpoint)
before = peak()
kept = load_weights(exprs, checkpoint)
print(json.dumps([peak() - before, sum(expr.nbytes for expr in exprs)]))
"""


def test_loading_peaks_at_the_result_and_the_mapped_file(tmp_path: Path) -> None:
    """bfloat16 to float32: the file's pages may be resident while they are mapped, a second float32 copy may not."""
    config = {**tiny("llama").config, "hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 4}
    source = DummySource(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = Checkpoint(source, load_spec("llama", config)).weights
    hub = {"attn.pre": "input_layernorm", "mlp.pre": "post_attention_layernorm"}
    tensors = {}
    for name, info in shapes.items():
        renamed = name
        for ours, theirs in hub.items():
            renamed = renamed.replace(ours, theirs)
        for ours, theirs in (("attn", "self_attn"), ("mlp", "mlp")):
            for letter in ("q", "k", "v", "o", "gate", "up", "down"):
                renamed = renamed.replace(f".{ours}.{letter}.", f".{theirs}.{letter}_proj.")
        fixed = {
            "embed.weight": "model.embed_tokens.weight",
            "final_norm.weight": "model.norm.weight",
            "head.weight": "lm_head.weight",
        }
        tensors[fixed.get(name, f"model.{renamed}")] = torch.zeros(info.shape, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-P", "-c", PEAK, str(tmp_path)], check=True, capture_output=True, text=True)
    grown, result = json.loads(done.stdout)
    assert grown < result * 1.5 + (8 << 20), f"{grown} bytes for a result of {result}"
