"""The rules from tensors to canonical weights, and what is said about tensors that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import tiny
from oracle_moe import MOE
from torch import Tensor

from treadle.graph.checkpoint import Checkpoint, CheckpointError
from treadle.graph.expected import expected
from treadle.graph.family import family_for, load_spec
from treadle.graph.source import DummySource, TensorInfo, open_source
from treadle.graph.spec import Attention, Embed, Head, Layer, Mlp, ModelSpec, Rule, Split, Sub

PLAIN = Rule(m="(.*)", to=r"\1")
NO_NORM_SPEC = ModelSpec(
    family="toy",
    hidden=4,
    vocab=6,
    max_positions=8,
    embed=Embed(),
    final_norm=None,
    head=Head(tied=True),
    layers=(Layer(index=0, subs=(Sub(name="mlp", op=Mlp(gated=False, intermediate=0)),)),),
    rules=(),
)
WANTED = {"embed.weight": (6, 4), "layers.0.mlp.up.weight": (8, 4), "layers.0.mlp.down.weight": (4, 8)}


class MemorySource(DummySource):
    """Tensors that are in memory."""

    kind = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__({})
        self._tensors = tensors
        self.tensors = {name: TensorInfo(tuple(t.shape), str(t.dtype)[6:], t.nbytes) for name, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def counted(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def weights() -> dict[str, Tensor]:
    return {name: counted(*shape) for name, shape in WANTED.items()}


def checkpoint(tensors: Mapping[str, Tensor], *rules: Rule, **options: Any) -> Checkpoint:
    spec = msgspec.structs.replace(NO_NORM_SPEC, rules=(*rules, PLAIN), strip=("^model:",))
    return Checkpoint(MemorySource(tensors), spec, **options)


def loaded(rule: Rule, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return what a rule makes of tensors; the weights that it does not give come as they are."""
    others = {key: value for key, value in weights().items() if key != name}
    made = checkpoint({**others, **tensors}, rule)
    result = made.read(name)
    assert made.weights[name].shape == tuple(result.shape), "shapes are known before reading"
    return result


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-tied", "gemma2", "gemma3-untied-capped", "llama-bias", *MOE])
def test_families_read_every_tensor_and_miss_none(name: str) -> None:
    source = open_source(tiny(name).path)
    spec = load_spec(family_for(source.config), source.config)
    real, dummy = Checkpoint(source, spec), Checkpoint(DummySource(source.config), spec)
    assert {key: info.shape for key, info in real.weights.items()} == {key: i.shape for key, i in dummy.weights.items()}
    assert real.unused == []
    for key, info in real.weights.items():
        assert tuple(real.read(key).shape) == info.shape


def test_transpose_scale_and_reshape() -> None:
    up = counted(4, 8)
    made = loaded(Rule(m="w", to="layers.0.mlp.up.weight", t=True, scale=0.5), {"w": up}, "layers.0.mlp.up.weight")
    assert torch.equal(made, up.t() * 0.5)
    flat = counted(32)
    made = loaded(
        Rule(m="w", to="layers.0.mlp.up.weight", reshape=(4, 8), post_t=True), {"w": flat}, "layers.0.mlp.up.weight"
    )
    assert torch.equal(made, flat.reshape(4, 8).t())
    open_size = Rule(m="w", to="layers.0.mlp.up.weight", reshape=(-1, 4))
    assert torch.equal(loaded(open_size, {"w": flat}, "layers.0.mlp.up.weight"), flat.reshape(8, 4))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_split(groups: int) -> None:
    fused = counted(16, 4)
    split = Split(groups=groups, sizes=(1, 1), to=("layers.0.mlp.up.weight", None))
    made = loaded(Rule(m="w", gsplit=split), {"w": fused}, "layers.0.mlp.up.weight")
    inside = fused.reshape(groups, 2, 8 // groups, 4)
    assert torch.equal(made, inside[:, 0].reshape(8, 4))


@settings(deadline=None)
@given(kv_heads=st.integers(1, 4), per_kv=st.integers(1, 3), head_dim=st.integers(1, 3), swapped=st.booleans())
def test_split_pieces_join_to_the_whole(kv_heads: int, per_kv: int, head_dim: int, swapped: bool) -> None:
    """Queries, keys and values of each group of heads side by side, rows or columns first."""
    heads = kv_heads * per_kv
    fused = counted((heads + 2 * kv_heads) * head_dim, 4)
    names = tuple(f"layers.0.attn.{part}.weight" for part in "qkv")
    rule = Rule(m="w", t=swapped, gsplit=Split(groups=kv_heads, sizes=(per_kv, 1, 1), to=names))
    op = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    spec = msgspec.structs.replace(
        NO_NORM_SPEC, rules=(rule, PLAIN), layers=(Layer(index=0, subs=(Sub(name="attn", op=op),)),)
    )
    tensors = {
        "w": fused.t() if swapped else fused,
        "embed.weight": counted(6, 4),
        "layers.0.attn.o.weight": counted(4, heads * head_dim),
    }
    made = Checkpoint(MemorySource(tensors), spec)
    parts = [made.read(name) for name in names]
    assert [part.shape[0] for part in parts] == [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    assert torch.equal(torch.cat([part.unflatten(0, (kv_heads, -1)) for part in parts], 1).flatten(0, 1), fused)


def packed(rows: int, columns: int, suffixes: tuple[str, str], *blocks: int) -> dict[str, Tensor]:
    """Values and scales of a weight [rows, columns] in which row i is i, as MXFP4 packs them."""
    values = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    for row, code in zip(range(rows), (0, 2, 4, 5, 6)):
        values[row] = code | code << 4
    values = values.reshape(rows, columns // 32, 16) if blocks else values
    scales = torch.full((rows, columns // 32), 127, dtype=torch.uint8)
    return {f"w{suffixes[0]}": values, f"w{suffixes[1]}": scales}


@pytest.mark.parametrize("suffixes", [("_blocks", "_scales"), ("_packed", "_scale")])
def test_packed_values_and_their_scales_are_one_weight(suffixes: tuple[str, str]) -> None:
    spec = msgspec.structs.replace(
        NO_NORM_SPEC, hidden=32, rules=(Rule(m="w_.*", to="layers.0.mlp.up.weight", quant="mxfp4"), PLAIN)
    )
    others = {"embed.weight": counted(6, 32), "layers.0.mlp.down.weight": counted(32, 5)}
    blocks = (1,) if suffixes[0] == "_blocks" else ()
    tensors = packed(5, 32, suffixes, *blocks)
    made = Checkpoint(MemorySource({**others, **tensors}), spec)
    assert made.weights["layers.0.mlp.up.weight"].shape == (5, 32)
    assert torch.equal(
        made.read("layers.0.mlp.up.weight"), torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])[:, None].expand(5, 32)
    )
    for wrong in (
        {**tensors, f"w{suffixes[1]}": torch.zeros(5, 2, dtype=torch.uint8)},
        {f"w{suffixes[0]}": tensors[f"w{suffixes[0]}"]},
    ):
        with pytest.raises(CheckpointError, match=rf"w{suffixes[0]} .*: needs w{suffixes[1]} \[5, 1\], both of uint8"):
            Checkpoint(MemorySource({**others, **wrong}), spec)


def test_stacked_pieces() -> None:
    rows = [counted(4) + i for i in range(8)]
    rule = Rule(m=r"row\.(\d+)", to=r"layers.0.mlp.up.weight[\1]")
    made = loaded(rule, {f"row.{i}": rows[i] for i in (3, 0, 1, 2, 7, 6, 5, 4)}, "layers.0.mlp.up.weight")
    assert torch.equal(made, torch.stack(rows))
    with pytest.raises(CheckpointError, match="lacks piece 2 of 8"):
        loaded(rule, {f"row.{i}": rows[i] for i in range(8) if i != 2}, "layers.0.mlp.up.weight")


def test_rules_for_some_layers_only_and_in_order() -> None:
    rules = (
        Rule(m=r"l(\d)\.x", layers=(1,), drop=True),
        Rule(m=r"l(\d)\.x", layers=(0,), to="layers.0.mlp.up.weight"),
    )
    tensors = weights()
    up = tensors.pop("layers.0.mlp.up.weight")
    made = checkpoint({**tensors, "l0.x": up, "l1.x": up + 1}, *rules)
    assert torch.equal(made.read("layers.0.mlp.up.weight"), up)


def test_prefixes_are_stripped() -> None:
    made = checkpoint({f"model:{name}": tensor for name, tensor in weights().items()})
    assert set(made.weights) == set(WANTED)


def test_missing_and_unused_are_all_named() -> None:
    tensors = {**weights(), **{f"extra{i}": counted(1) for i in range(13)}}
    del tensors["embed.weight"]
    with pytest.raises(CheckpointError) as error:
        checkpoint(tensors)
    assert "1 weights that no tensor gives: embed.weight" in str(error.value)
    assert "13 tensors that nothing reads: extra0, " in str(error.value)
    assert "extra9 and 3 more" in str(error.value)
    made = checkpoint(tensors, allow_unused=[r"extra\d+"], allow_missing=["embed.*"])
    assert set(made.initial) == {"embed.weight"}
    with pytest.raises(CheckpointError, match="extra0"):
        checkpoint(tensors, allow_unused=["xtra"], allow_missing=[".*"])


def test_a_size_that_fits_no_layer_is_not_told_of_every_layer() -> None:
    source = open_source(tiny("llama").path)
    with pytest.raises(CheckpointError, match=r"shapes that do not fit: .*, .*, .* and \d+ more") as error:
        Checkpoint(source, load_spec("llama", {**source.config, "hidden_size": 4096}))
    assert str(error.value).count("config.json makes it") == 3


def test_random_weights_need_every_size() -> None:
    """The toy leaves the width of its MLP to the tensors."""
    spec = msgspec.structs.replace(NO_NORM_SPEC, rules=(PLAIN,))
    with pytest.raises(CheckpointError, match=r"only a tensor tells: layers\.0\.mlp\.up\.weight"):
        Checkpoint(DummySource({}), spec)


def test_tensors_that_no_rule_knows(tmp_path: Path) -> None:
    source = open_source(tiny("llama").path)
    spec = load_spec("llama", source.config)
    spec = msgspec.structs.replace(spec, rules=tuple(rule for rule in spec.rules if "norm" not in rule.m))
    made = Checkpoint(source, spec, allow_unused=[r".*norm\.weight"], allow_missing=[r".*(norm|pre)\.weight"])
    assert all("norm" in name for name in made.unused)
    assert len(made.unused) == 7


def test_a_tied_head_may_be_stored_all_the_same() -> None:
    assert "head.weight" not in checkpoint({**weights(), "head.weight": counted(6, 4)}).weights


def test_biases_exist_where_their_tensor_does_and_must_where_declared() -> None:
    assert "layers.0.mlp.up.bias" in checkpoint({**weights(), "layers.0.mlp.up.bias": counted(8)}).weights
    spec = load_spec("qwen2", open_source(tiny("qwen2").path).config)
    wanted = expected(spec)
    assert wanted["layers.0.attn.q.bias"].required
    assert not wanted["layers.0.attn.o.bias"].required


def test_shapes_that_differ_from_config_are_named() -> None:
    tensors = {**weights(), "embed.weight": counted(7, 4)}
    with pytest.raises(CheckpointError, match=r"embed\.weight is \[7, 4\], config\.json makes it \[6, 4\]"):
        checkpoint(tensors)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(m="w", to="a", reshape=(5,)), r"w \[6\]: cannot become \[5\]"),
        (Rule(m="w", to="a", reshape=(-1, 4)), r"w \[6\]: cannot become \[-1, 4\]"),
        (Rule(m="w", to="a", reshape=(-1, 2, -1)), r"w \[6\]: cannot become \[-1, 2, -1\]"),
        (Rule(m="w", to="a", reshape=(0, -1)), r"w \[6\]: cannot become \[0, -1\]"),
        (Rule(m="w", to="a", t=True), r"w \[6\]: cannot be transposed"),
        (Rule(m="w", gsplit=Split(groups=4, sizes=(1, 1), to=("a", "b"))), r"does not split into 4 groups"),
    ],
)
def test_rules_that_cannot_apply(rule: Rule, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint({**weights(), "w": counted(6)}, rule)


def test_two_tensors_for_one_weight() -> None:
    with pytest.raises(CheckpointError, match=r"two tensors give embed\.weight"):
        checkpoint({**weights(), "again": counted(6, 4)}, Rule(m="again", to="embed.weight"))


def test_element_types_that_cannot_be_read() -> None:
    with pytest.raises(CheckpointError, match=r"embed\.weight is int32"):
        checkpoint({**weights(), "embed.weight": counted(6, 4).int()})


def test_expected_shapes_of_attention() -> None:
    op = Attention(heads=6, kv_heads=2, head_dim=8, v_head_dim=4, bias=True, sinks=True)
    layer = Layer(index=0, subs=(Sub(name="attn", op=op),))
    wanted = expected(msgspec.structs.replace(NO_NORM_SPEC, layers=(layer,), head=Head(bias=True)))
    shapes = {name.removeprefix("layers.0.attn."): item.shape for name, item in wanted.items() if item.required}
    assert shapes == {
        "embed.weight": (6, 4),
        "q.weight": (48, 4),
        "q.bias": (48,),
        "k.weight": (16, 4),
        "k.bias": (16,),
        "v.weight": (8, 4),
        "v.bias": (8,),
        "sinks": (6,),
        "o.weight": (4, 24),
        "head.weight": (6, 4),
        "head.bias": (6,),
    }
