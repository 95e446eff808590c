"""Sessions over HTTP with a real engine: what comes back, to whom, why not, and that nothing stays held."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from treadle.conf.size import format_bytes
from treadle.serve.__main__ import main

DETAILS = {"return_cached_tokens_details": True}


@pytest.fixture(scope="module")
def client(real_server):
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def ask(client, messages, count=8, **extra):
    """Return an answer's text and what its usage says of the cache."""
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=count, temperature=0, extra_body=DETAILS | extra
    )
    details = answer.usage.prompt_tokens_details.model_dump()
    cached, missed = details["cached_tokens_details"], details["uncached_tokens_details"]
    assert sum(cached.values()) == details["cached_tokens"]
    assert sum(cached.values()) + sum(missed.values()) == answer.usage.prompt_tokens
    return answer.choices[0].message.content, answer.usage.prompt_tokens, details["cached_tokens"], missed


def turn(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def test_the_second_turn_goes_on_from_the_first_and_tenants_share_nothing(client, real_server):
    first = turn("Tell me of the session that comes back, as long as three pages.")
    text, length, cached, missed = ask(client, first, session_id="s", cache_salt="one")
    assert (cached, missed) == (0, {"cold": length})
    second = [*first, *turn("", text)[1:], *turn("And what then?")]
    _, longer, cached, missed = ask(client, second, session_id="s", cache_salt="one")
    # All but what is not UTF-8 and comes back otherwise, and the last page.
    assert cached >= length // 16 * 16
    assert cached + sum(missed.values()) == longer
    other = ask(client, second, cache_salt="two")
    assert other[2:] == (0, {"cold": longer})
    assert ask(client, second)[2] == 0
    again = ask(client, second, cache_salt="two")
    assert again[0] == other[0]
    assert again[2:] == (longer // 16 * 16, {"below_granularity": longer % 16})
    assert ask(client, second, cache_salt="two", skip_reading_prefix_cache=True)[2:] == (0, {"opted_out": longer})


def test_misses_are_counted_by_reason(client, real_server):
    def counted():
        return {
            reason: real_server.series("treadle:prefix_missed_tokens_total", reason=reason)
            for reason in ("cold", "below_granularity", "salt", "opted_out")
        }

    before = counted()
    asked = turn("Count the reasons why this was not there, please.")
    # Answers fill the page that the prompt ends in: the cache knows how it went on.
    length = ask(client, asked, count=20)[1]
    ask(client, asked)
    ask(client, asked, cache_salt="another")
    ask(client, asked, skip_reading_prefix_cache=True)
    expected = {
        "cold": length + length % 16,
        "below_granularity": length % 16,
        "salt": length // 16 * 16,
        "opted_out": length,
    }
    real_server.wait_gauge("vllm:num_requests_running", 0)
    real_server.wait_gauge("treadle:prefix_missed_tokens_total", sum(before.values()) + sum(expected.values()))
    assert {reason: value - before[reason] for reason, value in counted().items()} == expected


def test_a_prefetch_says_what_is_there_and_a_pin_is_counted(client, real_server):
    asked = turn("Keep this for a moment; I will be back for it soon.")
    ask(client, asked, session_id="kept", cache_hints={"pin_s": 60})
    real_server.wait_gauge("treadle:sessions_pinned", 1)
    text, length, cached, missed = ask_nothing(client, asked)
    assert (text, cached, missed) == ("", (length - 1) // 16 * 16, {"below_granularity": length - cached})
    ask(client, asked, session_id="kept", cache_hints={"demote": True})
    real_server.wait_gauge("treadle:sessions_pinned", 0)


def ask_nothing(client, messages):
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        extra_body=DETAILS | {"session_id": "kept", "cache_hints": {"prefetch": True, "pin_s": 60}},
    )
    details = answer.usage.prompt_tokens_details.model_dump()
    text = answer.choices[0].message.content
    return text, answer.usage.prompt_tokens, details["cached_tokens"], details["uncached_tokens_details"]


def test_after_mixed_load_with_aborts_all_bytes_are_free_or_kept_for_others(real_server):
    """Over HTTP."""
    arena = real_server.gauge("treadle:arena_bytes")
    assert arena > 0
    whole = real_server.gauge("treadle:state_available_bytes") + real_server.gauge("treadle:state_cached_bytes")

    def stream(number: int) -> None:
        body = {
            "prompt": f"{number} mixed load " * (1 + number % 3),
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{real_server.url}/v1/completions", json=body, timeout=120) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                # Every third client leaves early, some of them before their turn came.
                if number % 3 == 0 and count >= number:
                    break

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real_server.wait_gauge("vllm:num_requests_running", 0, 10)
    real_server.wait_gauge("vllm:num_requests_waiting", 0)
    real_server.wait_gauge("treadle:state_used_bytes", 0)
    assert real_server.gauge("treadle:arena_bytes") == arena
    assert real_server.gauge("treadle:state_available_bytes") + real_server.gauge("treadle:state_cached_bytes") == whole
    assert real_server.gauge("treadle:kv_pages_used") == 0


def test_the_command_shows_the_bytes_of_a_running_server(client, real_server, capsys):
    ask(client, turn("One conversation whose state stays for a while."))
    held = {
        field: int(real_server.series(f"treadle:state_{field}_bytes", kind="kv"))
        for field in ("planned", "used", "cached", "free", "available")
    }
    assert main(["memory", "--url", real_server.url]) == 0
    text = capsys.readouterr().out
    assert "tiny at http://" in text
    row = next(line for line in text.splitlines() if line.startswith("│ kv "))
    assert held["planned"] > 0
    assert held["cached"] > 0
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [format_bytes(count) for count in held.values()]
    assert main(["memory", "--url", real_server.url + "0000"]) == 2
