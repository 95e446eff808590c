"""In bfloat16 a router chooses the experts that transformers chooses: in float32 where the family says so, else not.

Logits that differ by less than bfloat16 tells apart show which of the two a program does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import tiny
from torch import Tensor
from torch.fx import Node

from treadle.graph.build import BuildOptions, build
from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import load_spec
from treadle.graph.ir import Graph
from treadle.graph.source import open_source
from treadle.kernels import registry
from treadle.runtime.weights import load_weights


def bfloat16_model(name: str) -> tuple[Any, Graph, Checkpoint]:
    """Return transformers' model in bfloat16, as it loads it, and ours of the same files."""
    import transformers

    case = tiny(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        case.path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    registry.load_all()
    source = open_source(case.path)
    spec = load_spec(case.config["model_type"], source.config)
    checkpoint = Checkpoint(source, spec)
    ours = build(spec, checkpoint.weights, BuildOptions(dtype="bfloat16", max_len=64, page_tokens=4))
    return theirs, ours, checkpoint


def route(graph: Graph, checkpoint: Checkpoint, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
    """Run the ops from the normed stream ``h`` to the choice of a layer's experts."""
    (call,) = [call for call in graph.calls if call.layer == layer]
    body = graph.bodies[call.body]
    weights = load_weights(call.weights.values(), checkpoint)
    known: dict[Node, Any] = {
        node: weights[call.weights[node.name]] for node in body.placeholders if node.name in call.weights
    }
    (chosen,) = [node for node in body.ops if node.name == "mlp_route"]

    def value(node: Node) -> Any:
        if node.name == "mlp_pre":
            return h
        if node not in known:
            args = [value(arg) if isinstance(arg, Node) else arg for arg in node.args]
            known[node] = node.target(*args, **node.kwargs)
        return known[node]

    made: tuple[Tensor, Tensor] = value(chosen)
    return made


@pytest.mark.parametrize(
    ("name", "router", "layer"),
    [("glm4-moe", "gate", 1), ("hy-v3", "gate", 1), ("qwen3-moe", "gate", 0), ("mixtral", "gate", 0)],
)
def test_choices_and_weights_are_those_of_transformers(name: str, router: str, layer: int) -> None:
    theirs, ours, checkpoint = bfloat16_model(name)
    block = theirs.model.layers[layer].mlp
    h = torch.randn(4096, theirs.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        arguments = (block.e_score_correction_bias,) if name == "hy-v3" else ()
        _, weights, ids = getattr(block, router)(h, *arguments)
    made, chosen = route(ours, checkpoint, layer, h)
    order, mine = ids.sort(-1), chosen.long().sort(-1)
    assert torch.equal(order.values, mine.values)
    torch.testing.assert_close(
        weights.gather(1, order.indices).float(), made.gather(1, mine.indices), atol=4e-3, rtol=8e-3
    )


@pytest.mark.parametrize(("name", "dtype"), [("glm4-moe", torch.float32), ("mixtral", torch.bfloat16)])
def test_the_product_is_made_in_the_dtype_of_the_family(name: str, dtype: torch.dtype) -> None:
    _, ours, _ = bfloat16_model(name)
    bodies = [body for body in ours.bodies.values() if any(node.name == "mlp_route" for node in body.ops)]
    for body in bodies:
        (product,) = [node for node in body.ops if node.name == "mlp_router"]
        assert product.meta["val"].dtype == dtype
        assert product.args[1].meta["val"].dtype == dtype
