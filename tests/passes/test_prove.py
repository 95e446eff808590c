"""A pass that is wrong on purpose must not get past the prover, however small its mistake looks in the graph."""

import pytest
from toy import VOCAB, Toy, load
from wrong_pass import SwapGateAndUp, WidenWindow

from treadle.conf.schema import PassesConfig
from treadle.graph.spec import Moe
from treadle.graph.target import Target
from treadle.passes.pipeline import pipeline
from treadle.passes.prove import ProofError, Prover
from treadle.passes.runner import run_passes


def test_a_wrong_rewrite_is_caught_and_named() -> None:
    passes = pipeline(PassesConfig(quantize="none", compile=False), Target(device="cpu", page_tokens=4))
    with pytest.raises(ProofError, match="pass 1, SwapGateAndUp"):
        run_passes((SwapGateAndUp(), *passes), Toy().graph(), [Prover(load, VOCAB)])


def test_an_off_by_one_in_a_window_is_caught() -> None:
    fuse, place, *rest = pipeline(PassesConfig(quantize="none", compile=False), Target(device="cpu", page_tokens=4))
    with pytest.raises(ProofError, match="pass 3, WidenWindow"):
        run_passes((fuse, place, WidenWindow(), *rest), Toy(windows=(5, 0)).graph(), [Prover(load, VOCAB)])


@pytest.mark.parametrize("moe", [None, Moe(experts=4, top_k=2)])
def test_a_lossy_pass_may_move_results_only_by_its_tolerance(moe: Moe | None) -> None:
    prover = Prover(load, VOCAB)
    passes = pipeline(PassesConfig(quantize="int8", compile=False), Target(device="cpu", page_tokens=4))
    run_passes(passes, Toy(moe=moe).graph(), [prover])
    quantize, *others = prover.proofs
    assert 1e-4 < quantize.error <= quantize.allowed
    assert all(proof.error <= 2e-5 for proof in others)
