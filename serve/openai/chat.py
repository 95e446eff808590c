"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.runtime.request import Request
from treadle.runtime.text.output import Delta
from treadle.runtime.text.prompt import prepare
from treadle.serve.events import EventStream, until_left
from treadle.serve.openai.answers import Frame, finish, stream, usage
from treadle.serve.openai.body import read_body
from treadle.serve.openai.logprobs import chat_logprobs
from treadle.serve.openai.requests import ChatRequest
from treadle.serve.service import Answer, Service


async def chat_completions(service: Service, http: HttpRequest) -> Response:
    """Answer one request. Raises ApiError, ClientLeftError."""
    body, size = await read_body(http, ChatRequest, service.max_body_bytes)
    service.check_model(body.model)
    service.admit()
    response_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
    make = partial(_requests, service, body, response_id)
    requests = await until_left(http, service.prepare(make, size))
    answers = service.submit(requests)
    if body.stream:
        frame = Frame(service, "chat.completion.chunk", response_id, created)
        events = stream(answers, frame, _chunk, opening=_opening, include_usage=body.include_usage)
        return EventStream(events, answers)
    frame = Frame(service, "chat.completion", response_id, created)
    with service.closing(answers):
        await until_left(http, finish(answers))
        whole = frame.fields | {"choices": [_choice(answers[0])], "usage": usage(answers)}
        return Response(orjson.dumps(whole), media_type="application/json")


def _requests(service: Service, body: ChatRequest, response_id: str) -> list[Request]:
    defaults = service.tokenizer.facts.sampling
    params = body.sampling(defaults, max_tokens=body.token_limit, logprobs=body.logprob_count)
    text = service.template().render(body.plain_messages, extra=body.chat_template_kwargs)
    # The template has written the special tokens.
    request = prepare(
        service.tokenizer,
        text,
        params,
        service.limits,
        request_id=response_id,
        add_special_tokens=False,
        # What the model recommends is ours to shorten; what a client asked for is not.
        clamp=body.token_limit is None,
        field="messages",
    )
    return [request]


def _choice(answer: Answer) -> dict[str, Any]:
    output = answer.output
    wanted = answer.request.params.logprobs is not None
    return {
        "index": 0,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": chat_logprobs(output.logprobs) if wanted else None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _opening(index: int) -> bytes:
    """Return the choice that names the speaker, as JSON."""
    role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    return role % index


def _chunk(index: int, delta: Delta) -> bytes:
    """Return a streamed choice as JSON."""
    content = b'{"content":%b}' % orjson.dumps(delta.text) if delta.text else b"{}"
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}' % (
        index,
        content,
        orjson.dumps(chat_logprobs(delta.logprobs)),
        orjson.dumps(delta.finish_reason),
        orjson.dumps(delta.stop_reason),
    )
