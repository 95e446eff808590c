"""POST /v1/completions."""

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
from treadle.serve.openai.logprobs import CompletionLogprobs
from treadle.serve.openai.requests import COMPLETION_MAX_TOKENS, CompletionRequest
from treadle.serve.service import Answer, Service


async def completions(service: Service, http: HttpRequest) -> Response:
    """Answer one request. Raises ApiError, ClientLeftError."""
    body, size = await read_body(http, CompletionRequest, service.max_body_bytes)
    service.check_model(body.model)
    prompts = body.prompts
    service.admit(len(prompts))
    response_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    make = partial(_requests, service, body, response_id)
    requests = await until_left(http, service.prepare(make, size))
    answers = service.submit(requests)
    frame = Frame(service, "text_completion", response_id, created)
    if body.stream:
        choice = _Choices(len(answers))
        return EventStream(stream(answers, frame, choice, include_usage=body.include_usage), answers)
    with service.closing(answers):
        await until_left(http, finish(answers))
        choices = [_choice(i, answer) for i, answer in enumerate(answers)]
        whole = frame.fields | {"choices": choices, "usage": usage(answers)}
        return Response(orjson.dumps(whole), media_type="application/json")


def _requests(service: Service, body: CompletionRequest, response_id: str) -> list[Request]:
    defaults = {"max_tokens": COMPLETION_MAX_TOKENS, **service.tokenizer.facts.sampling}
    params = body.sampling(defaults, max_tokens=body.max_tokens, logprobs=body.logprobs)
    prompts = body.prompts
    return [
        prepare(
            service.tokenizer,
            prompt,
            params,
            service.limits,
            request_id=f"{response_id}-{i}",
            # The default is ours to shorten; what a client asked for is not.
            clamp=body.max_tokens is None,
            field="prompt" if len(prompts) == 1 else f"prompt[{i}]",
        )
        for i, prompt in enumerate(prompts)
    ]


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    output = answer.output
    wanted = answer.request.params.logprobs is not None
    return {
        "index": index,
        "text": output.text,
        "logprobs": CompletionLogprobs().render(output.logprobs if wanted else None),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


class _Choices:
    """Writes the choices of a streamed completion."""

    def __init__(self, count: int) -> None:
        self._logprobs = [CompletionLogprobs() for _ in range(count)]

    def __call__(self, index: int, delta: Delta) -> bytes:
        """Return the choice as JSON."""
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}' % (
            index,
            orjson.dumps(delta.text),
            orjson.dumps(self._logprobs[index].render(delta.logprobs)),
            orjson.dumps(delta.finish_reason),
            orjson.dumps(delta.stop_reason),
        )
