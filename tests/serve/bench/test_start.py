from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from treadle.conf.load import compose
from treadle.conf.lock import to_lock
from treadle.graph.resolve import resolve
from treadle.serve.bench.start import _first_token_s


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.gpu
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    deployment = resolve(compose(
        [
            "model=qwen3-0.6b", "hardware=cuda", "model.dtype=bfloat16", "model.max_len=2048", "kv.memory=1GiB",
            "model.config.num_hidden_layers=2", "model.config.vocab_size=2048",
            "scheduler.max_num_seqs=8", "scheduler.max_step_tokens=64",
        ]
    )).deployment  # fmt: skip
    compiled = tmp_path / "compiled"
    deployment = replace(deployment, passes=replace(deployment.passes, compile_cache=str(compiled)))
    lock = tmp_path / "deployment.yaml"
    lock.write_text(to_lock(deployment), encoding="utf-8")
    _first_token_s(lock, [*range(5, 21)], tmp_path)
    made = files(compiled)
    assert any(path.suffix == ".cubin" for path in made)
    _first_token_s(lock, [*range(5, 21)], tmp_path)
    assert files(compiled) == made
