"""The printed form of a body is Python that computes the same."""

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
    assert "layer 2: layer0" in text
    assert "h,  # float32[T, 64] stream" in text
    assert "attn_q_rope = op.rope(attn_q_heads, positions, rope_table, 'half', 'head')  # float32[T, 4, 16]" in text


def _value(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    shape = [int(size) for size in value.shape]
    if role(node) is Role.STEP:
        return torch.arange(shape[0]) % 3
    return torch.randn(shape).to(value.dtype)
