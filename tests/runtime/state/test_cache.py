from __future__ import annotations

from history_model import HYBRID, RECURRENT, VOCAB, Bench, answer


def test_a_checkpoint_cannot_be_used_in_the_step_that_makes_it() -> None:
    prompt = [(i * 7) % VOCAB for i in range(14)]
    bench = Bench(state=RECURRENT, max_step_tokens=32, overlap=False)
    bench.add("a", prompt, max_tokens=1)
    bench.add("b", prompt, max_tokens=1)
    bench.step()
    # The second waits for the checkpoint at 12 instead of computing up to there beside the first.
    assert [each.id for each in bench.engine._scheduler.running] == ["a"]
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") == answer(prompt, 1)
    assert bench.model.step_tokens == [12, 4]
    bench.close()


def test_a_budget_of_nothing_keeps_no_checkpoint_but_lets_the_preempted_return() -> None:
    bench = Bench(state=RECURRENT, num_pages=13, others=4, checkpoint_bytes=0)
    prompts = {f"r{n}": [(n * 7 + i) % VOCAB for i in range(8)] for n in range(4)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=24)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == answer(prompt, 24)
    assert bench.engine.stats().prefix_hit_tokens == 0
    assert len(bench.engine._memory.cache.snapshots) == 0 or bench.engine.stats().preemptions > 0
    bench.close()


def test_checkpoints_that_a_conversation_left_behind_go_first() -> None:
    bench = Bench(state=HYBRID)
    history = [(i * 5) % VOCAB for i in range(9)]
    for turn in range(4):
        history = [*history, 1, 2, 3, turn]
        bench.add(f"{turn}", history, max_tokens=4)
        bench.run()
        history = history + bench.tokens(f"{turn}")
    snapshots = bench.engine._memory.cache.snapshots
    order = [each.position for each in snapshots]
    # Prompts end at 13, 21, 29, 37: a checkpoint at the last page before, and a tail at the answer's end.
    assert order[-2:] == [36, 40]
    assert set(order[:3]) >= {12, 16}
    bench.close()
