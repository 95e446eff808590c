from __future__ import annotations

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "hé"}]


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body)


def test_a_prompt_and_its_way_back(server):
    found = post(server, "/tokenize", model="fake", prompt="hé!", return_token_strs=True).json()
    assert found == {
        "count": 4,
        "max_model_len": 2048,
        "tokens": [104, 0xC3, 0xA9, 33],
        "token_strs": ["h", "Ã", "©", "!"],
    }
    assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "hé!"}
    assert post(server, "/tokenize", prompt="").json()["tokens"] == []
    assert post(server, "/tokenize", prompt="a").json()["token_strs"] is None


def test_messages_as_a_chat_would_be(server):
    found = post(server, "/tokenize", messages=MESSAGES).json()
    assert bytes(found["tokens"]).decode() == "<user>hé<a>"
    chat = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()
    assert found["count"] == chat["usage"]["prompt_tokens"]
    found = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert bytes(found["tokens"]).decode() == "<user>hé"
    last = {"role": "assistant", "content": "so"}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    found = post(server, "/tokenize", messages=[*MESSAGES, last], **options).json()
    assert bytes(found["tokens"]).decode() == "<user>hé<assistant>so"


def test_special_tokens_are_shown_unless_they_are_skipped(server):
    assert post(server, "/detokenize", tokens=[97, 256]).json() == {"prompt": "a</s>"}
    assert post(server, "/detokenize", tokens=[97, 256], skip_special_tokens=True).json() == {"prompt": "a"}


def test_a_text_longer_than_the_context_is_counted_up_to_a_limit(server):
    assert post(server, "/tokenize", prompt="ab" * 5000).json()["count"] == 10000
    answer = post(server, "/tokenize", prompt="a" * 70_000)
    assert answer.status_code == 400
    assert "at most 65536" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "either"),
        ("/tokenize", {"prompt": 5}, "prompt", "string"),
        ("/tokenize", {"promt": "x"}, "promt", "'prompt'"),
        ("/tokenize", {"messages": []}, "messages", "at least 1"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template", "trust_chat_template"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "not supported"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": "x"}, "tokens", "array"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]", "258"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "0"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]", "integer"),
    ],
)
def test_refusals_name_the_field(server, path, body, param, words):
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_there(server, path):
    body = {"tokens": [1]} if path == "/detokenize" else {"prompt": "x"}
    assert post(server, path, model="other", **body).status_code == 404
