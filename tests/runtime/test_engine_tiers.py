"""State that leaves the device and comes back: nothing is computed twice while there is room anywhere."""

from __future__ import annotations

import pytest
from history_model import STATES, VOCAB, Bench, answer


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", sorted(STATES))
def test_requests_that_do_not_fit_together_are_computed_once(name: str, overlap: bool) -> None:
    """Memory for 2.2 sequences, eight of which want to run: PAINS."""
    prompts = {f"r{n}": [(n * 7 + i * i) % VOCAB for i in range(40)] for n in range(8)}
    bench = Bench(
        state=STATES[name], num_pages=44, others=20, overlap=overlap, max_num_seqs=8, host_bytes=1 << 20, max_len=84
    )
    for request, prompt in prompts.items():
        bench.add(request, prompt, max_tokens=40)
    last, idle = 0, 0
    while bench.engine.has_work:
        bench.step()
        given = sum(len(output.token_ids) for outputs in bench.outputs.values() for output in outputs)
        idle = 0 if given > last else idle + 1
        last = given
        assert idle < 200
    for request, prompt in prompts.items():
        assert bench.tokens(request) == answer(prompt, 40)
    stats = bench.engine.stats()
    assert stats.preemptions > 0
    # A prompt token once, an answer's token once but for the last.
    assert sum(bench.model.step_tokens) == 8 * (40 + 39)
    bench.close()
