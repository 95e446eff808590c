"""What the body of a gated short convolution writes; its logits are compared in test_family."""

from __future__ import annotations

from one_mixer import graph_of, parts, written

from treadle.graph.spec import ShortConv
from treadle.graph.state import BlockPart


def test_a_short_convolution_between_two_gates() -> None:
    graph = graph_of(ShortConv(kernel=3))
    assert written(graph, "mix_in") == "op.multiply(mix_b, mix_x)"
    assert written(graph, "mix_conv").startswith("op.conv1d(mix_in, mix_conv_weight, None, conv_state,")
    assert written(graph, "mix_out") == "op.multiply(mix_c, mix_conv)"
    assert parts(graph) == [BlockPart(kind="conv", shape=(2, 64), dtype="float32")]
