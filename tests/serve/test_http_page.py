"""docs/http.md names every route, field and metric that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from treadle.conf.override import schema_keys
from treadle.conf.schema import GROUPS
from treadle.runtime.params import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_N, MAX_STOP_TOKENS, MAX_STOPS
from treadle.runtime.request import MAX_PIN_S, MAX_SALT
from treadle.runtime.state.tiers.lane import CallStats
from treadle.runtime.state.tiers.stats import StoreStats, TierStats
from treadle.runtime.text.template import MAX_MESSAGES
from treadle.serve.openai.generation import MAX_ID, CacheHints, GenerationFields, StreamOptions
from treadle.serve.openai.requests import MAX_PROMPTS, ChatRequest, CompletionRequest
from treadle.serve.tokens import DetokenizeRequest, TokenizeRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def cells(text: str, column: int) -> str:
    """Return the cells of a column of the tables in ``text``."""
    return "\n".join(line.split("|")[column] for line in text.splitlines() if line.startswith("|"))


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z]\w*)`", text))


def paragraph(start: str) -> str:
    return next(part for part in PAGE.split("\n\n") if part.startswith(start))


def test_every_route_is_on_the_page_and_there(server):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    there = {f"{method.upper()} {path.replace('{name}', '{name}')}" for path, ways in paths.items() for method in ways}
    assert set(re.findall(r"`((?:GET|POST) \S+)`", cells(section("Routes"), 1))) == there


def test_every_field_is_on_the_page_and_there():
    both = names(cells(section("Fields of both generation endpoints"), 1))
    assert both == set(GenerationFields.model_fields)
    completions = names(paragraph("Completions take also")) | both
    assert completions == set(CompletionRequest.model_fields)
    chats = set(re.findall(r"`(\w+)`", paragraph("Chats take also"))) | both
    roles = {"system", "developer", "user", "assistant", "tool", "function"}
    assert chats - roles == set(ChatRequest.model_fields)
    assert names(paragraph("Changing nothing")) == set(GenerationFields.hints)
    refused = names(paragraph("Refused by name"))
    assert refused == {*CompletionRequest.neutral, *ChatRequest.neutral}
    options = next(line for line in PAGE.splitlines() if line.startswith("| `stream_options`"))
    assert names(options.split("|")[2]) == set(StreamOptions.model_fields)
    hints = next(line for line in PAGE.splitlines() if line.startswith("| `cache_hints`"))
    assert names(hints.split("|")[2]) == set(CacheHints.model_fields)
    tokens = names(paragraph("/tokenize takes"))
    assert tokens <= {*TokenizeRequest.model_fields, *DetokenizeRequest.model_fields}
    assert set(DetokenizeRequest.model_fields) <= tokens


@pytest.mark.parametrize(
    ("field", "limits"),
    [
        ("n", [MAX_N]),
        ("logit_bias", [MAX_BIAS, MAX_BIASES]),
        ("stop", [MAX_STOPS]),
        ("stop_token_ids", [MAX_STOP_TOKENS]),
        ("prompt_logprobs", [MAX_LOGPROBS]),
        ("request_id", [MAX_ID]),
        ("cache_salt", [MAX_SALT]),
        ("session_id", [MAX_SALT]),
        ("cache_hints", [int(MAX_PIN_S)]),
    ],
)
def test_limits_are_those_of_the_code(field, limits):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{field}`"))
    for limit in limits:
        assert str(limit) in row
    assert f"{MAX_MESSAGES:,}" in PAGE
    assert f"at most {MAX_PROMPTS})" in PAGE


def test_every_key_that_the_page_names_exists():
    found = re.findall(rf"\b(?:{'|'.join(GROUPS)})\.[a-z_]+", PAGE)
    assert len(set(found)) > 5
    assert set(found) <= schema_keys().keys()


def test_every_metric_is_on_the_page_and_there(server):
    text = httpx.get(f"{server.url}/metrics").text
    there = {name for name in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE) if not name.endswith("_created")}
    # Those of the tiers are on their page.
    tiers = {name for name in there if name.startswith("vllm:kv_offload_")}
    shown = {f"vllm:{name}" for name in names(cells(section("Metrics"), 1))}
    ours = set(re.findall(r"`(treadle:\w+)`", section("Metrics")))
    assert shown | ours == there - tiers


def test_every_metric_of_the_tiers_is_on_their_page():
    store = StoreStats({call: CallStats() for call in ("load", "save", "lookup")}, (0, 0), True, False, 0, "")
    metrics = TierStats(queries={"none": 1}, stores={"disk": store}).metrics()
    there = {metric.name + "_total" * (metric.kind == "counter") for metric in metrics}
    page = (Path(__file__).resolve().parents[2] / "docs" / "tiers.md").read_text()
    assert set(re.findall(r"`(kv_offload_\w+)`", page.partition("\n## Metrics\n")[2])) == there
