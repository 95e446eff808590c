"""The whole pipeline: every pass proved on every form of the toy, in the subsets that configuration allows."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import tiny
from oracle_case import VOCAB as CASE_VOCAB
from oracle_graph import graph_of
from toy import VOCAB, Toy, load

from treadle.conf.check import check
from treadle.conf.schema import PASSES, REQUIRED_PASSES, Deployment, ModelConfig, PassesConfig
from treadle.graph.ir import Level
from treadle.graph.spec import QKNorm
from treadle.graph.target import Target
from treadle.passes.fuse_norm_rope import FuseNormRope
from treadle.passes.pipeline import pipeline
from treadle.passes.prove import Prover, evaluate, row_error
from treadle.passes.runner import run_passes
from treadle.passes.sample import draw
from treadle.runtime.weights import load_weights

FORMS = {
    "llama": Toy(),
    "qwen3": Toy(qk_norm=QKNorm(eps=1e-5), tied=False),
    "olmo2": Toy(qk_norm=QKNorm(scope="full"), bias=True),
    "gemma": Toy(windows=(5, 5, 0), post=True, softcap=20.0),
    "phi": Toy(gated=False, bias=True),
}
OPTIONAL = (
    "fuse_projections", "fuse_add_norm", "fuse_rope_cache", "fuse_activation", "fuse_linear_add", "fuse_norm_gated"
)  # fmt: skip
FEW_ONLY = {"fuse_linear_add", "fuse_norm_gated"}


def target(dtype: str = "float32", max_tokens: int | None = None) -> Target:
    return Target(device="cpu", dtype=dtype, page_tokens=4, max_tokens=max_tokens)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("max_tokens", [None, 8])
def test_every_pass_is_proved(form: str, dtype: str, quantize: str, max_tokens: int | None) -> None:
    prover = Prover(load, VOCAB)
    passes = pipeline(PassesConfig(quantize=quantize, compile=False), target(dtype, max_tokens))
    lowered = run_passes(passes, FORMS[form].graph(dtype), [prover])
    assert lowered.level is Level.LOWERED
    assert [proof.applied for proof in prover.proofs] == list(passes)


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "falcon-mamba", "mamba2", "lfm2-options"])
@pytest.mark.parametrize("max_tokens", [None, 8])
def test_every_pass_is_proved_on_states_of_fixed_size(name: str, max_tokens: int | None) -> None:
    checkpoint, graph = graph_of(tiny(name))
    prover = Prover(partial(load_weights, checkpoint=checkpoint), CASE_VOCAB)
    passes = pipeline(PassesConfig(quantize="none", compile=False), target(max_tokens=max_tokens))
    lowered = run_passes(passes, graph, [prover])
    assert [proof.applied for proof in prover.proofs] == list(passes)
    kernels = {node.meta.get("kernel") for body in lowered.bodies.values() for node in body.ops}
    assert "conv1d" in {str(kernel).partition(".")[0] for kernel in kernels}


@pytest.mark.parametrize("off", OPTIONAL)
def test_a_pass_switched_off_leaves_the_results(off: str) -> None:
    graph = FORMS["qwen3"].graph()
    sample = draw(graph, VOCAB)
    exact = evaluate(graph, load, sample)
    passes = pipeline(PassesConfig(quantize="none", compile=False, **{off: False}), target(max_tokens=8))
    assert off not in [each.name for each in passes]
    assert row_error(exact, evaluate(run_passes(passes, graph), load, sample)) < 2e-5


def test_some_passes_serve_few_tokens_only() -> None:
    config = PassesConfig(compile=False)
    many, few = ({each.name for each in pipeline(config, target(max_tokens=count))} for count in (9, 8))
    assert few - many == FEW_ONLY
    assert many < few


def test_few_tokens_of_a_llama_take_few_kernels() -> None:
    passes = pipeline(PassesConfig(quantize="none", compile=False), target(max_tokens=8))
    lowered = run_passes(passes, FORMS["llama"].graph())
    kernels = [node.meta["kernel"] for node in lowered.bodies["layer0"].ops if "kernel" in node.meta]
    assert [name.partition(".")[0] for name in kernels] == [
        "linear", "rope_cache_write", "paged_attention", "linear_add", "norm_gated_linear", "linear_add", "norm"
    ]  # fmt: skip


def test_fused_passes_shrink_the_graph() -> None:
    graph = Toy().graph()
    nodes: dict[str, tuple[int, int]] = {}
    run_passes(
        pipeline(PassesConfig(quantize="int8", compile=False), target()),
        graph,
        [lambda step: nodes.update({step.applied.name: (step.before.num_nodes, step.after.num_nodes)})],
    )
    for name in ("fuse_rope_cache", "fuse_activation"):
        before, after = nodes[name]
        assert after < before, name


def test_layers_of_one_kind_share_a_body() -> None:
    assert set(Toy(windows=(5, 5, 0)).graph().bodies) == {"embed", "layer0", "layer1", "head"}


def test_the_configuration_knows_the_level_of_every_pass() -> None:
    config = PassesConfig(quantize="int8")
    made = pipeline(config, target(max_tokens=8))
    assert {each.name: each.level.value for each in made} == {
        name: level for name, level in PASSES.items() if name != "fuse_norm_rope"
    }
    assert FuseNormRope.level.value == PASSES["fuse_norm_rope"]


@settings(deadline=None, max_examples=15)
@given(order=st.permutations(list(PASSES)))
def test_any_order_that_the_configuration_lets_pass_works(order: list[str]) -> None:
    levels = list(dict.fromkeys(PASSES.values()))
    within = sorted(order, key=lambda name: (levels.index(PASSES[name]), name in REQUIRED_PASSES))
    chosen = PassesConfig(order=tuple(within), quantize="int8", compile=False)
    check(Deployment(model=ModelConfig(path="x"), passes=chosen))
    graph = FORMS["qwen3"].graph()
    lowered = run_passes(pipeline(chosen, target(max_tokens=8)), graph)
    assert lowered.level is Level.LOWERED
    sample = draw(graph, VOCAB)
    assert row_error(evaluate(graph, load, sample), evaluate(lowered, load, sample)) < 0.1


def test_the_same_sample_gives_the_same_results() -> None:
    graph = Toy().graph()
    first, second = (evaluate(graph, load, draw(graph, VOCAB)) for _ in range(2))
    assert torch.equal(first, second)
