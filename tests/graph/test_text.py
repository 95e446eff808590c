"""The printed form of a body is Python that computes the same."""

from dataclasses import replace

import pytest
import torch
from toy import Toy

from treadle.conf.schema import PassesConfig
from treadle.graph.ir import Role, role
from treadle.graph.target import Target
from treadle.graph.text import graph_text
from treadle.kernels import registry
from treadle.passes.pipeline import pipeline
from treadle.passes.runner import run_passes


@pytest.mark.parametrize("lowered", [False, True])
def test_printed_bodies_run_and_agree(lowered: bool) -> None:
    registry.load_all()
    graph = Toy().graph()
    if lowered:
        config = PassesConfig(quantize="none", compile=False, kernels="reference")
        graph = run_passes(pipeline(config, Target(device="cpu", page_tokens=4, kernels="reference")), graph)
    namespace: dict[str, object] = {}
    exec(graph_text(graph), namespace)
    for name in ("embed", "head"):
        body = graph.bodies[name]
        inputs = [_value(node) for node in body.placeholders]
        printed = namespace[name](*inputs)  # type: ignore[operator]
        for mine, theirs in zip(printed, body.function()(*inputs)):
            assert torch.equal(mine, theirs)


def test_printed_text_shows_types_and_roles() -> None:
    text = graph_text(Toy().graph())
    table = text.partition("\nimport")[0].splitlines()
    assert table == ["# level model; calls in order:", "#   embed", "#   layers 0 to 2: layer0", "#   head"]
    assert "h,  # float32[T, 64] stream" in text
    assert "attn_q_rope = op.rope(attn_q_heads, positions, rope_table, 'half', 'head')  # float32[T, 4, 16]" in text


def test_only_neighbours_that_are_alike_are_one_line() -> None:
    graph = Toy().graph()
    embed, first, second, third, head = graph.calls
    calls = (embed, first, replace(second, body="other"), third, replace(third, layer=3), replace(third, layer=5), head)
    table = graph_text(replace(graph, calls=calls)).partition("\nimport")[0].splitlines()[2:-1]
    assert table == ["#   layer 0: layer0", "#   layer 1: other", "#   layers 2 to 3: layer0", "#   layer 5: layer0"]


def _value(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    shape = [int(size) for size in value.shape]
    if role(node) is Role.STEP:
        return torch.arange(shape[0]) % 3
    return torch.randn(shape).to(value.dtype)
