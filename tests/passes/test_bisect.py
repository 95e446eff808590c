"""bisect names the pass and the node at fault: a wrong pass, a wrong kernel, and nothing where all is sound."""

from dataclasses import replace

import pytest
from toy import VOCAB, Toy, load
from wrong_pass import SwapGateAndUp

from treadle.conf.schema import PassesConfig
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.registry import Kernel
from treadle.passes.bisect import bisect
from treadle.passes.pipeline import pipeline

TARGET = Target(device="cpu", page_tokens=4)
CONFIG = PassesConfig(quantize="none", compile=False)


def test_a_sound_pipeline_has_no_culprit() -> None:
    assert bisect(pipeline(CONFIG, TARGET), Toy().graph(), load, VOCAB) is None


def test_a_wrong_pass_is_named_with_the_node_it_broke() -> None:
    culprit = bisect((SwapGateAndUp(), *pipeline(CONFIG, TARGET)), Toy().graph(), load, VOCAB)
    assert culprit is not None
    assert (culprit.applied.name, culprit.body, culprit.node) == ("swap_gate_and_up", "layer0", "mlp_act")


@pytest.mark.parametrize(("op", "node"), [("rope_cache_write", "attn_q_rope"), ("gated_activation", "mlp_act")])
def test_a_wrong_kernel_is_named_with_its_node(op: str, node: str) -> None:
    right = registry.reference(op)

    def wrong(*args: object) -> object:
        result = right.function(*args)
        result[-1] = 0.5  # the last row only
        return result

    kernel = replace(right, name=f"{op}.wrong", function=wrong, inline=True, priority=1000)
    assert isinstance(kernel, Kernel)
    with registry.registered(kernel):
        culprit = bisect(pipeline(CONFIG, TARGET), Toy().graph(), load, VOCAB)
    assert culprit is not None
    assert (culprit.applied.name, culprit.body, culprit.node) == ("choose_kernels", "layer0", node)
    assert culprit.kernel == f"{op}.wrong"
