from __future__ import annotations

import io
import re

from rich.console import Console

from treadle.conf.load import compose
from treadle.conf.size import format_bytes
from treadle.graph.resolve import resolve
from treadle.serve.ready import cache_info, ready_table, summary


def printed(*overrides: str) -> tuple[str, object]:
    resolved = resolve(compose(overrides))
    console = Console(file=io.StringIO(), width=120)
    console.print(ready_table("http://127.0.0.1:1/v1", summary(resolved)))
    return console.file.getvalue(), resolved


def test_the_table_has_what_the_plan_says_without_colours():
    text, resolved = printed("model=llama3-8b", "hardware=h200", "serve.api_key=secret", "kv.page_tokens=32")
    plan = resolved.plan
    rows = dict(re.findall(r"│ (\w[\w ]*?) +│ (.*?) +│", text))
    assert rows["endpoint"] == "http://127.0.0.1:1/v1"
    assert rows["model"] == "llama3-8b (llama), bfloat16"
    assert rows["device"] == "cuda: h200"
    assert rows["context"] == f"{plan.max_len:,} tokens of a sequence"
    assert rows["at once"].startswith(f"256 sequences, {plan.full_sequences:,} of them")
    cache = f"{plan.num_pages * 32:,} tokens in {plan.num_pages:,} pages of 32; prefixes are kept"
    assert rows["kv cache"] == cache
    assert rows["in all"] == f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.memory_bytes)}"
    for kind in {row.kind for row in plan.rows}:
        assert f"{kind}: " in text
    assert "secret" not in text
    assert "\x1b" not in text
    assert cache_info(resolved)["num_gpu_blocks"] == str(plan.num_pages)


def test_an_open_port_and_other_choices_are_said():
    text, _ = printed("model=gemma3-270m", "hardware.threads=2", "kv.prefix_cache=false", "hardware.device=cpu")
    assert "whoever reaches the port may ask" in text
    assert "prefixes are not kept" in text
    assert ", 2 threads" in text


def test_kinds_of_state_and_tiers_are_said(tmp_path):
    text, resolved = printed("model=llama3-8b", "hardware=h200")
    assert f"kv: pages of {format_bytes(resolved.plan.kv.page_bytes)}" in text
    assert "nothing; kv.host_memory keeps state there" in text
    tiers = ["kv.host_memory=2GiB", f"kv.disk.path={tmp_path}", "kv.connectors=[{name: peer}]"]
    text, resolved = printed("model=gemma3-270m", "hardware.device=cpu", *tiers)
    for group in resolved.plan.state.groups:
        assert f"{group.name}: pages of {format_bytes(group.page_bytes)}" in text
    assert ("prompts go on from checkpoints" in text) == resolved.plan.state.needs_checkpoints
    assert re.search(r"tiers +│ 2.00 GiB of main memory", text)
    assert "disk /" in text
    assert "│ peer" in text


def test_a_server_says_it_once_when_it_is_ready(real_server):
    url, output = real_server.url, real_server.output
    assert output.count("│ endpoint") == output.count("│ kv cache") == 1
    assert f"│ endpoint │ {url}/v1" in output
    assert output.index("start-up") < output.index("│ endpoint") < output.index(" answers at ")
    assert "\x1b" not in output
