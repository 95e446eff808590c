"""The names that dashboards ask for, and counters that equal what clients saw."""

from __future__ import annotations

import json
import re
from collections import Counter

import httpx
import pytest

DASHBOARD = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "gpu_cache_usage_perc": "gauge",
    "avg_prompt_throughput_toks_per_s": "gauge",
    "avg_generation_throughput_toks_per_s": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "num_preemptions_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "gpu_prefix_cache_queries_total": "counter",
    "gpu_prefix_cache_hits_total": "counter",
    "e2e_request_latency_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "prompt_tokens_by_source_total": "counter",
    "external_prefix_cache_queries_total": "counter",
    "external_prefix_cache_hits_total": "counter",
    "kv_offload_load_bytes_total": "counter",
    "request_prefill_kv_computed_tokens": "histogram",
}
"""vLLM's names after its prefix, and their types"""


def kinds(server) -> dict[str, str]:
    """Return the type of every metric of a server by its name."""
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE))


@pytest.mark.parametrize("prefix", ["vllm:", "mine_"])
def test_dashboards_find_their_names(start, prefix):
    server = start(metrics_prefix=prefix)
    text = httpx.get(f"{server.url}/metrics").text
    found = kinds(server)
    for name, kind in DASHBOARD.items():
        assert found[f"{prefix}{name}"] == kind, name
        suffix = "_bucket" if kind == "histogram" else ""
        assert re.search(rf'^{prefix}{name}{suffix}\{{.*model_name="fake".*\}} \S+$', text, re.MULTILINE), name
    ours = {"treadle:requests_refused_total", "treadle:steps_total", "treadle:kv_pages", "treadle:kv_pages_used"}
    ours |= {"treadle:prefix_missed_tokens_total", "treadle:recomputed_tokens_total"}
    assert ours <= found.keys()


class Client:
    """Sends requests, and adds up what their answers say."""

    def __init__(self, server):
        self.http = httpx.Client(base_url=server.url, timeout=30)
        self.sums: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def send(self, i: int) -> None:
        """Send request ``i`` of the script."""
        text, most = "abcdefgh"[: 1 + i % 8], 1 + i % 23
        body = {"prompt": text, "max_tokens": most}
        if i % 10 == 9:
            assert self.http.post("/v1/completions", json=body | {"temperature": -1}).status_code == 400
            return
        if i % 5 == 1:
            body["stop"] = [text[-1] * 2, text[0]]
        if i % 7 == 3:
            body["prompt"] = [text, text[::-1], "x"]
        path = "/v1/completions"
        if i % 4 == 2:
            body = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": most}
            path = "/v1/chat/completions"
        if i % 3 == 0:
            self._take_stream(
                self.http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
            )
        else:
            self._take(self.http.post(path, json=body).json())
        self.sums["prompts"] += len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        self.sums["asked_answers"] += len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        self.sums["asked_tokens"] += most * (3 if isinstance(body.get("prompt"), list) else 1)

    def _take_stream(self, answer) -> None:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
        self._take({"choices": ends, "usage": events[-1]["usage"]})

    def _take(self, answer) -> None:
        for choice in answer["choices"]:
            self.reasons[choice["finish_reason"]] += 1
        usage = answer["usage"]
        self.sums["prompt"] += usage["prompt_tokens"]
        self.sums["completion"] += usage["completion_tokens"]
        self.sums["cached"] += usage["prompt_tokens_details"]["cached_tokens"]


def sample(server, name: str, **labels: str) -> float:
    """Return the value of the one series of this name and these labels."""
    want = "".join(rf'(?=.*{key}="{value}")' for key, value in labels.items())
    found = re.findall(
        rf"^{re.escape(name)}\{{{want}.*\}} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE
    )
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def test_counters_equal_what_100_requests_saw(start):
    server = start()
    client = Client(server)
    with client.http:
        for i in range(100):
            client.send(i)
    sums, answers = client.sums, client.reasons.total()
    for reason in ("stop", "length", "abort", "error"):
        assert sample(server, "vllm:request_success_total", finished_reason=reason) == client.reasons[reason]
    assert client.reasons["stop"] > 5
    expected = {
        "prompt_tokens_total": sums["prompt"],
        "generation_tokens_total": sums["completion"],
        "prompt_tokens_cached_total": sums["cached"],
        "request_prefill_kv_computed_tokens_sum": sums["prompt"] - sums["cached"],
        "request_prompt_tokens_sum": sums["prompt"],
        "request_generation_tokens_sum": sums["completion"],
        "request_params_max_tokens_sum": sums["asked_tokens"],
        "request_params_n_sum": sums["asked_answers"],
        "request_generation_tokens_count": answers,
        "time_to_first_token_seconds_count": answers,
        "e2e_request_latency_seconds_count": answers,
        "request_queue_time_seconds_count": answers,
        "request_prefill_time_seconds_count": answers,
        "request_decode_time_seconds_count": answers,
        "request_inference_time_seconds_count": answers,
    }
    assert {name: sample(server, f"vllm:{name}") for name in expected} == expected
    assert sample(server, "treadle:requests_refused_total") == 0
    by_source = {
        "local_compute": sums["prompt"] - sums["cached"],
        # The engine says of one token of every prompt that it came from the host.
        "local_cache_hit": sums["cached"] - sums["prompts"],
        "external_kv_transfer": sums["prompts"],
    }
    for source, count in by_source.items():
        assert sample(server, "vllm:prompt_tokens_by_source_total", source=source) == count


def test_the_engines_counters_equal_what_clients_saw(real_server):
    before = {name: real_server.gauge(f"vllm:{name}") for name in ("prefix_cache_hits_total", "prompt_tokens_total")}
    client = Client(real_server)
    client.http.timeout = 120
    text = "a prompt that is longer than two pages, twice. "
    with client.http:
        for i in range(4):
            body = {"prompt": text + str(i // 2), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            client._take(client.http.post("/v1/completions", json=body).json())
    real_server.wait_gauge("vllm:num_requests_running", 0)
    real_server.wait_gauge("vllm:prefix_cache_hits_total", before["prefix_cache_hits_total"] + client.sums["cached"])
    assert client.sums["cached"] >= 3 * 32
    assert real_server.gauge("vllm:prompt_tokens_total") - before["prompt_tokens_total"] == client.sums["prompt"]
    steps = real_server.gauge("treadle:steps_total")
    assert real_server.gauge("vllm:iteration_tokens_total_count") == steps > 0
    assert real_server.gauge("vllm:iteration_tokens_total_sum") >= 4 * 3
    labels = {"block_size": "16", "enable_prefix_caching": "True", "cache_dtype": "float32"}
    assert sample(real_server, "vllm:cache_config_info", **labels) == 1
