"""Families: descriptions load, options reach the model, mistakes are named, and logits are those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import CASES, tiny
from oracle_graph import check

from treadle.graph.family import FAMILIES, family_for, known_families, load_spec
from treadle.graph.spec import Attention, Mlp, ModelSpec, SpecError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 99,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "silu",
}


def attentions(spec: ModelSpec) -> list[Attention]:
    return [sub.op for layer in spec.layers for sub in layer.subs if isinstance(sub.op, Attention)]


def write_family(folder: Path, text: str) -> tuple[Path, ...]:
    (folder / "mine.yaml").write_text(text)
    return (folder,)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str) -> None:
    check(tiny(name))


@pytest.mark.parametrize("family", known_families())
def test_every_family_has_an_oracle(family: str) -> None:
    # transformers does not have Kimi K3: test_kimi_k3.py writes it out
    assert family in {"kimi_k3", *(case.model_type for case in CASES.values())}


def test_values_by_layer() -> None:
    spec = load_spec("gemma3_text", {**LLAMA, "num_hidden_layers": 8, "sliding_window": 5})
    assert [op.window for op in attentions(spec)] == [5, 5, 5, 5, 5, 0, 5, 5]
    thetas = [op.rope.theta for op in attentions(spec) if op.rope]
    assert thetas == [1e4] * 5 + [1e6] + [1e4] * 2
    assert [layer.kind for layer in spec.layers][4:6] == ["sliding_attention", "full_attention"]
    ops = attentions(spec)
    assert ops[0] is ops[1], "equal layers share their structs"


def test_old_and_new_spellings_of_rope_agree() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    old = load_spec("llama", {**LLAMA, "rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = load_spec("llama", {**LLAMA, "rope_parameters": {**rope, "rope_theta": 5.0}})
    assert attentions(old) == attentions(new)
    assert (
        attentions(old)[0].rope
        == attentions(load_spec("llama", {**LLAMA, "rope_theta": 5.0, "rope_scaling": rope}))[0].rope
    )


def test_text_part_of_a_multimodal_config() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **{k: v for k, v in LLAMA.items() if k != "model_type"}},
    }
    assert family_for(config) == "gemma3_text"
    spec = load_spec("gemma3_text", config)
    assert (spec.hidden, spec.head.tied, attentions(spec)[0].head_dim) == (64, True, 256)
    assert family_for({"model_type": "gemma3"}) == "gemma3_text"


def test_family_by_architecture_when_there_is_no_model_type() -> None:
    assert family_for({"architectures": ["Qwen3ForCausalLM"]}) == "qwen3"


def test_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"model_type=qwen4.*did you mean qwen[23]"):
        family_for({"model_type": "qwen4"})


def test_unknown_family_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean mistral"):
        load_spec("mistrl", LLAMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ops: {attn: {windwo: 4}}", r"ops\.attn\.windwo: unknown field; did you mean window"),
        ("ops: {attn: {qk_norm: {kind: rms, epz: 1}}}", r"ops\.attn\.qk_norm\.epz: unknown field; did you mean eps"),
        ("ops: {attn: {op: attentoin}}", r"ops\.attn\.op=attentoin: not one of the choices; did you mean attention"),
        ("ops: {attn: {layout: halff}}", r"ops\.attn\.layout=halff.*did you mean half"),
        ("ops: {attn: {heads: two}}", r"ops\.attn\.heads=two: expected `int`, got `str`"),
        ("ops: {attn: {heads: '${hf:n_head}'}}", r"ops\.attn\.heads: a value is required.*\$\{hf:n_head\}"),
        ("ops: {attn: {heads: 3, kv_heads: 2}}", r"heads 3 is not a multiple of kv_heads 2"),
        ("ops: {attn: {rope: mian}}", r"ops\.attn\.rope=mian: no such rope table; did you mean main"),
        ("rope: {main: {thetta: 1}}", r"unknown field; did you mean theta"),
        ("layers: {sub: {attn: {op: attm}}}", r"layers\.sub\.attn\.op=attm: no such op; did you mean attn"),
        ("layers: {sub: {attn: {prre: norm}}}", r"layers\.sub\.attn\.prre: unknown field; did you mean pre"),
        ("layers: {sub: {attn: {pre: nrom}}}", r"no such norm; did you mean norm"),
        ("layers: {cuont: 3}", r"layers\.cuont"),
        ("haed: {tied: true}", r"haed: unknown section; did you mean head"),
        ("ops: {attn: {window: {per_layer: [1, 2]}}}", r"one value a layer is required, 4 in all"),
        ("ops: {attn: {window: {by_kind: {a: 1}}}}", r"has no value for layer 0"),
        ("ops: {attn: {window: {pattern: {evry: 2}}}}", r"evry: unknown field"),
        ("ops: {attn: {scale: \"${x:'open(1)'}\"}}", r"open may not be called"),
        ("ops: {attn: {scale: \"${x:'hidden_size.__class__'}\"}}", r"__class__ may not be read"),
        ("ops: {attn: {scale: \"${x:'1 / nothing'}\"}}", r"config.json has no nothing"),
        ("ops: {attn: {scale: \"${x:'1 +'}\"}}", r"not an expression"),
        ("embed: {scale: '${nrom}'}", r"embed\.scale: there is no nrom to refer to; did you mean norm"),
        ("norm: {eps: '${norm.eps}'}", r"refers to itself"),
        ("weights: [{m: 'a(', to: b}]", r"weights\[0\]\.m=a\(: not a regular expression"),
        ("weights: [{m: 'a', to: 'b.\\2'}]", r"asks for group 2"),
        ("weights: [{m: 'a'}]", r"needs one of to, gsplit and drop"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    search = write_family(tmp_path, f"extends: llama\n{text}\n")
    with pytest.raises(SpecError, match=message):
        load_spec("mine", LLAMA, search)


def test_an_op_that_no_layer_uses_is_checked_too(tmp_path: Path) -> None:
    search = write_family(tmp_path, "extends: llama\nops: {moe: {op: moe, experts: 4, top_k: 2, routre: {}}}\n")
    with pytest.raises(SpecError, match="did you mean router"):
        load_spec("mine", LLAMA, search)


def test_merge_replace_and_variants(tmp_path: Path) -> None:
    search = write_family(
        tmp_path,
        """
extends: llama
ops:
  attn: {window: 7}
  mlp: {_replace_: true, op: mlp, gated: false, act: gelu}
variants:
- {if: "wide", ops: {attn: {window: 9}}}
weights:
- {m: 'extra', drop: true}
""",
    )
    plain, wide = load_spec("mine", LLAMA, search), load_spec("mine", {**LLAMA, "wide": True}, search)
    assert (attentions(plain)[0].window, attentions(wide)[0].window) == (7, 9)
    mlp = plain.layers[0].subs[1].op
    assert isinstance(mlp, Mlp)
    assert (mlp.gated, mlp.intermediate) == (False, 0)
    assert (plain.rules[0].m, plain.rules[1].m) == ("extra", r"model\.embed_tokens\.weight")


def test_the_whole_vocabulary_decodes(tmp_path: Path) -> None:
    """One description with every kind of op, as later families will use them."""
    search = write_family(tmp_path, (Path(__file__).parent / "vocabulary.yaml").read_text())
    spec = load_spec("mine", LLAMA, search)
    kinds = {type(sub.op).__name__ for layer in spec.layers for sub in layer.subs}
    assert kinds >= {"Attention", "Mla", "Delta", "Mamba2", "Mamba1", "ShortConv", "Moe", "Csa", "Rglru", "Rwkv4"}
    moe = next(sub.op for sub in spec.layers[0].subs if sub.name == "moe")
    assert moe.shared.act == "relu"  # type: ignore[union-attr]
    assert spec.layers[0].subs[-1].branches[1].scale == 0.5
    assert spec.mtp is not None
    assert spec.mtp.layer[0].name == "attn"


def test_descriptions_load_without_torch() -> None:
    code = (
        "import sys, json; from treadle.graph.family import load_spec, family_for; "
        "import treadle.graph.checkpoint, treadle.graph.memory, treadle.graph.gguf, treadle.graph.weights; "
        "load_spec('qwen3', json.loads(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code, json.dumps(LLAMA)], check=True)


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_description_says_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


def dummy_config(**more: Any) -> dict[str, Any]:
    return {**LLAMA, **more}


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [0] * 4),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 2}, [0] * 4),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True}, [0, 0, 8, 8]),
        ("gemma2", {"sliding_window": 8}, [8, 0, 8, 0]),
    ],
)
def test_windows_follow_config(family: str, options: dict[str, Any], windows: list[int]) -> None:
    assert [op.window for op in attentions(load_spec(family, dummy_config(**options)))] == windows
