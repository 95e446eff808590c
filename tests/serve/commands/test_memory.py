from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from treadle.conf.load import compose
from treadle.graph.resolve import resolve
from treadle.serve import running
from treadle.serve.commands.memory import ask, run


def printed(*overrides: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    assert run(resolve(compose(["model=qwen3-0.6b", "hardware.memory=8GiB", *overrides])), console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def numbers(text: str, start: str) -> list[int]:
    line = next(line for line in text.splitlines() if start in line)
    return [int(number.replace(",", "")) for number in re.findall(r"(?<![\d.])\d[\d,]*(?![\d.])", line)]


def test_every_byte_of_the_plan_is_printed():
    text = printed()
    plan = resolve(compose(["model=qwen3-0.6b", "hardware.memory=8GiB"])).plan
    for row in plan.rows:
        assert row.item in text
        assert f"{row.nbytes:,}" in text
    assert plan.total_bytes in numbers(text, "of 8.00 GiB")
    assert plan.total_bytes + plan.free_bytes == 8 << 30


def test_weights_of_a_known_shape_are_exact():
    """Qwen3-0.6B has 596,049,920 parameters, at two bytes each in bfloat16."""
    rows = resolve(compose(["model=qwen3-0.6b", "model.dtype=bfloat16"])).plan.rows
    assert sum(row.nbytes for row in rows if row.kind == "weights") == 2 * 596_049_920


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_what_fits_follows_the_arena(page_tokens):
    text = printed("kv.memory=1GiB", f"kv.page_tokens={page_tokens}", "model.dtype=bfloat16", "model.max_len=1024")
    token_bytes = 28 * 2 * 8 * 128 * 2
    assert numbers(text, "bytes of a token")[-1] == token_bytes
    tokens = numbers(text, "tokens in the arena")[-1]
    assert (1 << 30) - 2 * page_tokens * token_bytes <= tokens * token_bytes <= 1 << 30
    assert numbers(text, "that the arena holds at once")[-1] == tokens // 1024


def test_a_disk_has_a_line_beside_the_plan(tmp_path):
    folder = tmp_path / "[a] disk of a rather long name"
    text = printed(f"kv.disk.path='{folder}'", "kv.disk.memory=3GiB")
    assert f"disk, files of state in {folder}: 3.00 GiB at most\n" in text
    assert "disk" not in printed()


def test_names_are_printed_as_they_are():
    assert "[/x] (qwen3, " in printed("model.name='[/x]'")


def test_what_a_server_calls_things_is_printed_as_it_is(monkeypatch):
    labels = frozenset({("kind", "[/x]")})
    values = {name: {labels: 256.0} for name in ("treadle:state_planned_bytes", "treadle:state_used_bytes")}
    up, used = "vllm:kv_offload_tiering_up", "vllm:kv_offload_tiering_used_bytes"
    values[up] = {frozenset({("tier", tier)}): 1.0 for tier in ("[/y]", "quiet")}
    values[used] = {frozenset({("tier", "[/y]")}): 1024.0}
    monkeypatch.setattr(running, "read_metrics", lambda *_: running.Samples("[/m]", values))
    console = Console(file=io.StringIO(), width=200)
    assert ask(compose([]), console, "http://[::1]:8000") == 0
    text = console.file.getvalue()
    assert "[/m] at http://[::1]:8000" in text
    assert "[/x]" in text
    assert re.search(r"\[/y\] +│ +1\.00 KiB", text)
    assert re.search(r"quiet +│ it does not say", text)


def test_a_known_bandwidth_bounds_the_speed():
    assert "bandwidth allows" not in printed()
    assert numbers(printed("hardware.bandwidth_gbps=100", "model.dtype=bfloat16"), "bandwidth allows")[-1] in range(
        83, 85
    )


def test_what_could_be_is_no_less_than_what_is():
    console = Console(file=io.StringIO(), width=200)
    run(resolve(compose(["model=qwen3-0.6b", "hardware=h200", "model.max_len=1024"])), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    together = numbers(text, "scheduler.max_num_seqs")[-1]
    assert numbers(text, "that the arena holds at once")[-1] == together == 256
    assert numbers(text, "most full ones")[-1] > together
    small = printed("kv.memory=512MiB", "model.max_len=1024")
    assert numbers(small, "most full ones")[-1] == numbers(printed("model.max_len=1024"), "most full ones")[-1]
    assert numbers(small, "that the arena holds at once")[-1] < numbers(small, "most full ones")[-1]
