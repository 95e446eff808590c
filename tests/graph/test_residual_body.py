"""What flows between layers when it is more than one sum."""

from __future__ import annotations

import pytest
from toy import Shape, Toy, lines

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.ir import Graph
from treadle.graph.spec import Layer, Mlp, ModelSpec, Norm, PerLayerInput, Residual, SpecError, Sub

NORM, MLP = Norm(eps=1e-5), Mlp(gated=False, act="relu", intermediate=8)


def graph(residual: Residual, *layers: tuple[Sub, ...], **more: object) -> Graph:
    plain = Toy(windows=(0,)).spec()
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    stack = tuple(Layer(index=i, subs=subs) for i, subs in enumerate(layers))
    spec = ModelSpec(**{**values, "layers": stack, "residual": residual, **more})
    tensors = {name: Shape(item.shape) for name, item in expected(spec).items() if item.required}
    return build(spec, tensors, BuildOptions(dtype="float32", max_len=8, page_tokens=4))


def one(name: str, **options: object) -> Sub:
    return Sub(name=name, pre=NORM, op=MLP, **options)


def written(made: Graph) -> list[str]:
    return [line for body in made.bodies for line in lines(made, body)]


def outputs(made: Graph) -> list[tuple[str, ...]]:
    return [made.bodies[call.body].outputs for call in made.calls]


def test_streams_are_opened_mixed_in_every_sublayer_and_closed_by_the_head() -> None:
    made = graph(Residual(kind="mhc", streams=3, iters=2), (one("a"), one("b")), (one("a"), one("b")))
    assert outputs(made) == [("x",), ("x",), ("x",), ("logits",)]
    assert made.calls[1].body == made.calls[2].body, "equal layers share one body"
    text = written(made)
    assert "streams = op.hyper_open(embed, 3)" in text
    weights = "a_hc_fn, a_hc_base, a_hc_scale"
    assert f"a_hyper = op.hyper_pre(x, {weights}, 'mhc', 2, 1e-06, 1e-06, 1.0)" in text
    assert "a_residual = op.hyper_post(a_down, x, a_spread)" in text
    assert "b_residual = op.hyper_post(b_down, a_residual, b_spread)" in text
    assert "head_mix = op.hyper_close(rows, head_hc_fn, head_hc_base, head_hc_scale, 1e-06, 1e-06)" in text


def test_snapshots_are_banked_and_bodies_with_as_many_of_them_are_shared() -> None:
    layers = [(one("a", snapshot=i % 2 == 0), one("b")) for i in range(4)]
    made = graph(Residual(kind="attn_res", eps=1e-3), *layers)
    assert outputs(made) == [("x",), ("x", "bank"), ("x",), ("x", "bank"), ("x",), ("logits",)]
    assert len({call.body for call in made.calls}) == 6, "each layer reads another number of snapshots"
    first, second = (made.bodies[made.calls[i].body] for i in (1, 3))
    shapes = [tuple(body.graph.output_node().args[0][1].meta["val"].shape)[1] for body in (first, second)]
    assert shapes == [1, 2]
    text = written(made)
    assert "a_residual = op.add(x, a_down)" in text
    assert "b_mix = op.res_mix(a_snapshot, a_down, b_res_norm, b_res_proj, 0.001)" in text
    assert "head_mix = op.res_mix(bank_rows, rows, head_res_norm, head_res_proj, 0.001)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_scale": 2.0}, r"layers\.0\.a: residual.kind = mhc: skip_scale = 2.0"),
        ({"residual_from": "normed"}, r"residual_from = 'normed'"),
        ({"post_residual": NORM}, r"post_residual"),
    ],
)
def test_what_only_one_sum_knows_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        graph(Residual(kind="mhc", streams=2), (one("a", **options),))


def test_inputs_of_layers_belong_to_one_sum() -> None:
    given = PerLayerInput(dim=4, act="gelu", norm=NORM)
    made = graph(Residual(), (one("a"),), (one("a"),), per_layer_input=given, layer_scalar=True)
    assert outputs(made)[0] == ("x", "h", "per_layer")
    assert made.calls[1].body == made.calls[2].body
    text = written(made)
    assert "ple = op.act_mul(ple_gate, layer_input_row, 'gelu')" in text
    assert "scaled = op.multiply(ple_residual, scalar)" in text
    with pytest.raises(SpecError, match="per_layer_input"):
        graph(Residual(kind="mhc", streams=2), (one("a"),), per_layer_input=given)
