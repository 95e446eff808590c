"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.runtime.request import Request, spread
from treadle.runtime.text.output import Delta
from treadle.runtime.text.prompt import prepare
from treadle.serve.events import EventStream, until_left
from treadle.serve.openai.answers import Frame, Shown, finish, stream, usage, whole
from treadle.serve.openai.body import read_body
from treadle.serve.openai.identity import Identity
from treadle.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from treadle.serve.openai.requests import ChatRequest
from treadle.serve.served import Served
from treadle.serve.service import Service


async def chat_completions(service: Service, http: HttpRequest) -> Response:
    """Answer one request. Raises ApiError, ClientLeftError."""
    body, size = await read_body(http, ChatRequest, service.max_body_bytes)
    service.check_model(body.model)
    service.admit(max(body.n or 1, 1))
    identity, created = Identity.of(http, body.request_id), int(time.time())
    prompt = await until_left(http, service.off_loop(partial(chat_prompt, service, body, identity.internal), size))
    answers = service.submit(spread(prompt.request))
    if body.stream:
        style = _Style(body, prompt)
        frame = Frame(service, "chat.completion.chunk", identity.response("chatcmpl"), created)
        events = stream(
            answers,
            frame,
            style.chunk,
            opening=style.opening,
            extra=style.first_fields,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            cache_details=body.return_cached_tokens_details,
            shows_ids=bool(body.return_token_ids),
        )
        return EventStream(events, answers, {"x-request-id": identity.shown})
    with service.closing(answers):
        await until_left(http, finish(answers))
        return whole(chat_completion(service, body, prompt, answers, identity, created), identity.shown)


def chat_completion(
    served: Served, body: ChatRequest, prompt: ChatPrompt, answers: Sequence[Shown], identity: Identity, created: int
) -> dict[str, Any]:
    """Return the object of a chat whose answers are complete."""
    style = _Style(body, prompt)
    content = Frame(served, "chat.completion", identity.response("chatcmpl"), created).fields | {
        "service_tier": None,
        "choices": [style.choice(i, answer) for i, answer in enumerate(answers)],
        "usage": usage(answers, cache_details=body.return_cached_tokens_details),
    }
    if body.prompt_logprobs is not None:
        content["prompt_logprobs"] = prompt_logprobs(answers[0].output.prompt_logprobs)
    if body.return_token_ids:
        content["prompt_token_ids"] = prompt.request.prompt
    return content


class ChatPrompt(NamedTuple):
    """The request of a conversation, its ``n`` still to be spread."""

    request: Request
    echo: str
    """the assistant's words that the answer goes on with, if they are wanted back"""


def chat_prompt(served: Served, body: ChatRequest, name: str, *, clamp: bool = False) -> ChatPrompt:
    """Return the request of a chat; ``name`` is its id in the engine.

    ``clamp`` shortens an answer that would not fit instead of refusing it. Raises ApiError, RequestError.
    """
    params = body.sampling(
        served.tokenizer.facts.sampling,
        max_tokens=body.token_limit,
        logprobs=body.logprob_count,
        prompt_logprobs=body.prompt_logprobs,
    )
    last, text, seams = body.conversation.render(served)
    # The template has written the special tokens, unless the client knows that it does not.
    request = prepare(
        served.tokenizer,
        text,
        params,
        served.limits,
        request_id=name,
        add_special_tokens=bool(body.add_special_tokens),
        # The default is ours to shorten; what a client asked for is not.
        clamp=clamp or body.token_limit is None,
        field="messages",
        cache_salt=body.cache_salt,
        session=body.session,
        seams=seams,
    )
    return ChatPrompt(request, str(last["content"]) if body.echo and last["role"] == "assistant" else "")


class _Style:
    """Writes the choices of one chat as its request wants them."""

    def __init__(self, body: ChatRequest, prompt: ChatPrompt) -> None:
        self._by_id = bool(body.return_tokens_as_token_ids)
        self._token_ids = bool(body.return_token_ids)
        self._echo = prompt.echo
        ids = orjson.dumps(prompt.request.prompt) if self._token_ids else b""
        self.first_fields = b',"prompt_token_ids":' + ids if ids else b""
        """fields of a stream's first event"""

    def choice(self, index: int, answer: Shown) -> dict[str, Any]:
        """Return a complete choice."""
        output = answer.output
        entries = output.logprobs if answer.request.params.wants_logprobs else None
        found = {
            "index": index,
            "message": {"role": "assistant", "content": self._echo + output.text, "refusal": None},
            "logprobs": chat_logprobs(entries, self._by_id),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return found | {"token_ids": output.token_ids} if self._token_ids else found

    def opening(self, index: int, answer: Shown) -> bytes:  # noqa: ARG002
        """Return the choice that names the speaker, as JSON."""
        role = b'{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}'
        return role % (index, orjson.dumps(self._echo))

    def chunk(self, index: int, answer: Shown, delta: Delta) -> bytes:  # noqa: ARG002
        """Return a streamed choice as JSON."""
        content = b'{"content":%b}' % orjson.dumps(delta.text) if delta.text else b"{}"
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            index,
            content,
            orjson.dumps(chat_logprobs(delta.logprobs, self._by_id)),
            orjson.dumps(delta.finish_reason),
            orjson.dumps(delta.stop_reason),
            b',"token_ids":' + orjson.dumps(delta.token_ids) if self._token_ids else b"",
        )
