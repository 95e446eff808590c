"""Bodies that are made to cost much: each is refused at once, and other clients do not notice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from treadle.serve.openai import body as body_module
from treadle.serve.openai.body import invalid, read_body
from treadle.serve.openai.requests import CompletionRequest

MIB = 1 << 20
FILL = MIB - 1000
"""bytes below the limit of a short context"""


def many(start: bytes, item: bytes, end: bytes) -> bytes:
    return start + b",".join([item] * (FILL // (len(item) + 1))) + end


def keys() -> bytes:
    return ",".join(f'"{i:x}":0' for i in range(FILL // 10)).encode()


COMPLETIONS = {
    "nulls": (many(b'{"prompt":[', b"null", b"]}"), "prompt"),
    "lists": (many(b'{"prompt":[', b"[null]", b"]}"), "prompt"),
    "nulls in a list": (many(b'{"prompt":[[', b"null", b"]]}"), "prompt"),
    "nulls behind an id": (many(b'{"prompt":[1,', b"null", b"]}"), "prompt"),
    "ids": (many(b'{"prompt":[', b"1", b"]}"), "prompt"),
    "unknown keys": (b"{" + keys() + b"}", "0"),
    "a long key": (b'{"' + b"k" * FILL + b'":1,"prompt":"x"}', None),
    "a long model": (b'{"prompt":"x","model":"' + b"m" * FILL + b'"}', "model"),
    "a long id": (b'{"prompt":[1,"' + b"m" * FILL + b'"]}', "prompt"),
    "stops": (many(b'{"prompt":"x","stop":[', b"1", b"]}"), "stop"),
    "stop ids": (many(b'{"prompt":"x","stop_token_ids":[', b"null", b"]}"), "stop_token_ids[0]"),
    "stream options": (b'{"prompt":"x","stream":true,"stream_options":{' + keys() + b"}}", "stream_options.0"),
    "letters": (b'{"prompt":"' + b"a" * FILL + b'"}', "prompt"),
    "spaces": (b'{"prompt":"' + b" " * FILL + b'"}', "prompt"),
}
CHATS = {
    "numbers": (many(b'{"messages":[', b"1", b"]}"), "messages"),
    "empty messages": (many(b'{"messages":[', b"{}", b"]}"), "messages"),
    "a few numbers": (b'{"messages":[1,1,1]}', "messages[0]"),
    "parts": (many(b'{"messages":[{"role":"user","content":[', b"1", b"]}]}"), "messages[0].content[0].type"),
    "empty parts": (many(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}],"
                         b'"max_tokens":0}'), "max_tokens"),
    "keys of a message": (b'{"messages":[{"role":"user","content":"x",' + keys() + b"}]}", "messages[0].0"),
    "a long type": (b'{"messages":[{"role":"user","content":[{"type":"' + b"t" * FILL + b'"}]}]}',
                    "messages[0].content[0].type"),
}  # fmt: skip
ATTACKS = [
    *(pytest.param("completions", *case, id=name) for name, case in COMPLETIONS.items()),
    *(pytest.param("chat/completions", *case, id=name) for name, case in CHATS.items()),
]


@pytest.mark.parametrize(("path", "raw", "param"), ATTACKS)
def test_costly_bodies_are_refused_at_their_first_mistake(server, path, raw, param):
    url = f"{server.url}/v1/{path}"
    began_s = time.monotonic()
    answer = httpx.post(url, content=raw, timeout=60)
    seconds = time.monotonic() - began_s
    assert answer.status_code in (400, 404), answer.text
    assert seconds < 1.0
    assert len(answer.content) < 2000
    if param is not None:
        assert answer.json()["error"]["param"].partition("[1]")[0] == param


def test_costly_bodies_hold_up_nobody(server):
    """A client that asks all the time is answered soon while others attack, and memory stays small."""

    async def run():
        gaps = []
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            attack = asyncio.gather(*(client.post(f"/v1/{case.values[0]}", content=case.values[1]) for case in ATTACKS))
            while not attack.done():
                began_s = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                gaps.append(time.monotonic() - began_s)
                await asyncio.sleep(0.01)
            await attack
        return gaps

    gaps = asyncio.run(run())
    assert max(gaps) < 2.0
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_kib < 1 << 20


def test_the_limit_grows_with_the_context_and_is_named(server):
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * (MIB + 16 * 2048 + 1))
    assert answer.status_code == 413
    assert str(MIB + 16 * 2048) in answer.json()["error"]["message"]
    chunks = (b" " * 65536 for _ in range(40))
    assert httpx.post(f"{server.url}/v1/completions", content=chunks).status_code == 413


def test_a_refused_body_leaves_its_connection_in_order(server):
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/completions", content=b" " * (4 * MIB)).status_code == 413
        answer = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "ab"


class SlowRequest:
    def __init__(self, pause_s):
        self.headers = {}
        self._pause_s = pause_s

    async def stream(self):
        for piece in (b'{"prompt"', b':"x"}'):
            yield piece
            await asyncio.sleep(self._pause_s)


def test_a_slow_body_is_given_up(monkeypatch):
    monkeypatch.setattr(body_module, "BODY_S", 0.1)
    assert asyncio.run(read_body(SlowRequest(0.01), CompletionRequest, 100))[0].prompt == "x"
    with pytest.raises(body_module.ApiError, match=r"within 0\.1 s") as caught:
        asyncio.run(read_body(SlowRequest(1.0), CompletionRequest, 100))
    assert caught.value.status == 408
    assert caught.value.headers == {"connection": "close"}


def test_what_is_not_checked_here_has_its_schema(server):
    schema = httpx.get(f"{server.url}/openapi.json").json()
    bodies = [schema["paths"][f"/v1/{path}"]["post"]["requestBody"] for path in ("completions", "chat/completions")]
    prompt, messages = (body["content"]["application/json"]["schema"]["properties"] for body in bodies)
    assert len(prompt["prompt"]["anyOf"]) == 4
    assert messages["messages"]["type"] == "array"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, 'temperature: Input should be a valid number, not "hot"'),
        ({"ignore_eos": 1.5}, "ignore_eos: Input should be a valid boolean, not 1.5"),
        ({"stop": True}, "stop: Input should be a valid string; or: Input should be a valid array, not true"),
        ({"seed": "x" * 500}, f'seed: Input should be a valid integer, not "{"x" * 50}...{"x" * 50}"'),
        ({"seed": [1]}, "seed: Input should be a valid integer"),
    ],
)
def test_a_refused_value_is_said_where_it_is_short(fields, message):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "x"} | fields)
    assert invalid(caught.value).message == message
