from __future__ import annotations

import json

import pytest

from treadle.conf.errors import ConfigError
from treadle.serve.batch.records import count_records, read_records
from treadle.serve.openai.requests import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def read(tmp_path, *lines, defaults=None):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return list(read_records(file, defaults or {}))


def test_prompts_messages_and_openais_lines(tmp_path):
    ours, chat, theirs, numbered = read(
        tmp_path,
        {"prompt": "a", "top_k": 5},
        {"id": "x", "messages": MESSAGES, "max_completion_tokens": 7},
        {"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2]}},
        b"",
        {"id": 5, "prompt": "b"},
        defaults={"max_tokens": 9, "temperature": 0.0},
    )
    assert (ours.id, ours.line, ours.openai, ours.clamp) == ("line-1", 1, False, True)
    assert isinstance(ours.body, CompletionRequest)
    assert (ours.body.top_k, ours.body.max_tokens, ours.body.temperature) == (5, 9, 0.0)
    assert isinstance(chat.body, ChatRequest)
    assert (chat.id, chat.clamp, chat.body.max_tokens, chat.body.max_completion_tokens) == ("x", False, None, 7)
    assert (theirs.id, theirs.openai, theirs.body.max_tokens, theirs.body.temperature) == ("y", True, None, None)
    assert (numbered.id, numbered.line) == (5, 5)


@pytest.mark.parametrize(
    ("line", "name", "param", "words"),
    [
        (b"{", None, None, "line 2 is not valid JSON: EOF while parsing an object at column 1"),
        (b"\xff\xfe", None, None, "line 2 is not valid JSON: expected value at column 1"),
        (b"[1]", None, None, "must be a JSON object"),
        ({"id": "x"}, "x", "prompt", "either prompt or messages"),
        ({"id": "x", "promt": "a"}, "x", "promt", "prompt"),
        ({"id": "x", "prompt": "a", "messages": MESSAGES}, "x", "prompt", "either"),
        ({"id": "x", "prompt": ["a", "b"]}, "x", "prompt", "one prompt"),
        ({"id": "x", "promt": "a", "prompt": "a"}, "x", "promt", "'prompt'"),
        ({"id": "x", "prompt": "a", "top_k": "b"}, "x", "top_k", "integer"),
        ({"id": "x", "prompt": "a", "stream": True}, "x", "stream", "whole"),
        ({"id": ["x"], "prompt": "a"}, None, "id", "a text or an integer"),
        ({"id": 2**64, "prompt": "a"}, None, "id", "64 bits"),
        ({"id": "x", "messages": MESSAGES, "tools": [{}]}, "x", "tools", "not supported"),
        ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "x", "url", "/v1/chat/completions"),
        ({"custom_id": "x", "url": ["/v1/completions"], "body": {}}, "x", "url", "/v1/chat/completions"),
        ({"custom_id": "x", "url": "/v1/completions", "body": 5}, "x", "body", "object"),
        ({"custom_id": "x", "url": "/v1/completions", "bdy": {}}, "x", "bdy", "'body'"),
        ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, "x", "method", "POST"),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(tmp_path, line, name, param, words):
    good = {"prompt": "a"}
    first, bad, last = read(tmp_path, good, line, good)
    assert first.error is last.error is None
    assert (bad.line, bad.id, bad.body) == (2, name, None)
    assert bad.error.param == param
    assert words in bad.error.message


def test_an_id_that_comes_twice_is_an_error_the_second_time(tmp_path):
    first, second, third = read(tmp_path, *({"id": "x", "prompt": str(i)} for i in range(3)))
    assert first.error is None
    assert "that of line 1" in second.error.message
    assert len({first.key, second.key, third.key}) == 3


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    assert count_records(tmp_path / "prompts.jsonl") == 0
    with pytest.raises(ConfigError, match=r"did you mean .*prompts\.jsonl"):
        count_records(tmp_path / "prompt.jsonl")
