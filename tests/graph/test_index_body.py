"""Who chooses keys, and who takes over another layer's choice; what a choice computes is test_mla_body's."""

from __future__ import annotations

import msgspec
import pytest
from one_layer import spec_of
from toy import lines

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.ir import Graph, Role, role
from treadle.graph.spec import Index, Mla, ModelSpec, SpecError
from treadle.graph.verify import verify

INDEX = Index(kind="dsa", heads=2, dim=8, topk=3)


def graph_of(*shares: bool, topk: int = 3) -> Graph:
    layers = []
    for number, share in enumerate(shares):
        index = msgspec.structs.replace(INDEX, share=share, topk=topk)
        op = Mla(heads=4, kv_lora=16, rope_dim=8, nope=12, v_dim=20, index=index)
        (layer,) = spec_of(op).layers
        layers.append(msgspec.structs.replace(layer, index=number))
    plain = spec_of(op)
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    spec = ModelSpec(**{**values, "layers": tuple(layers)})
    wanted = {name: item for name, item in expected(spec).items() if item.required}
    made = build(spec, wanted, BuildOptions(dtype="bfloat16", max_len=64, page_tokens=4))
    verify(made)
    return made


def streams(graph: Graph, body: str) -> list[str]:
    return [node.name for node in graph.bodies[body].placeholders if role(node) is Role.STREAM]


def test_a_choice_goes_to_the_layers_that_share_it() -> None:
    made = graph_of(False, True, True, False)
    assert [call.body for call in made.calls] == ["embed", "layer0", "layer1", "layer1", "layer0", "head"]
    assert "choice" in made.bodies["layer0"].outputs
    assert "choice" in streams(made, "layer1")
    assert not any("index_select" in line for line in lines(made, "layer1"))
    assert [layer.kind for layer in made.state.full.layers] == [
        "latent",
        "index",
        "latent",
        "latent",
        "latent",
        "index",
    ]


def test_a_choice_that_nobody_shares_stays_in_its_layer() -> None:
    made = graph_of(False, False)
    assert made.bodies["layer0"].outputs == ("x", "h")
    assert "choice" not in streams(made, "layer0")


def test_heads_are_weighed_in_float32_and_no_more_keys_chosen_than_a_sequence_has() -> None:
    choice = next(line for line in lines(graph_of(False, topk=500)) if "op.index_select" in line)
    assert choice.endswith(", 64)")
    assert "attn_index_weights = op.linear(attn_index_in, attn_index_w, None)" in lines(graph_of(False))


def test_the_first_layer_has_nothing_to_share() -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.attn\.index: share = true, and no layer before"):
        graph_of(True, False)
