"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.runtime.request import Request, spread
from treadle.runtime.text.output import Alternative, Delta, Logprobs
from treadle.runtime.text.prompt import prepare
from treadle.runtime.text.tokenizer import Tokenizer
from treadle.serve.errors import ApiError
from treadle.serve.events import EventStream, until_left
from treadle.serve.openai.answers import Frame, Shown, finish, stream, usage, whole
from treadle.serve.openai.body import read_body
from treadle.serve.openai.identity import Identity
from treadle.serve.openai.logprobs import CompletionLogprobs, prompt_logprobs
from treadle.serve.openai.requests import COMPLETION_MAX_TOKENS, CompletionRequest
from treadle.serve.served import Served
from treadle.serve.service import Service


async def completions(service: Service, http: HttpRequest) -> Response:
    """Answer one request. Raises ApiError, ClientLeftError."""
    body, size = await read_body(http, CompletionRequest, service.max_body_bytes)
    service.check_model(body.model)
    num_prompts, n = len(body.prompts), max(body.n or 1, 1)
    service.admit(num_prompts * n, "prompt" if num_prompts > 1 else "n")
    identity, created = Identity.of(http, body.request_id), int(time.time())
    requests = await until_left(
        http, service.off_loop(partial(completion_requests, service, body, identity.internal), size)
    )
    answers = service.submit([one for request in requests for one in spread(request)])
    if body.stream:
        frame = Frame(service, "text_completion", identity.response("cmpl"), created)
        style = _Style(service.tokenizer, body, answers)
        events = stream(
            answers,
            frame,
            style.chunk,
            opening=style.opening,
            only_opening=body.only_echo,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            cache_details=body.return_cached_tokens_details,
            shows_ids=bool(body.return_token_ids),
        )
        return EventStream(events, answers, {"x-request-id": identity.shown})
    with service.closing(answers):
        await until_left(http, finish(answers))
        return whole(completion(service, body, answers, identity, created), identity.shown)


def completion(
    served: Served, body: CompletionRequest, answers: Sequence[Shown], identity: Identity, created: int
) -> dict[str, Any]:
    """Return the object of a completion whose answers are complete."""
    style = _Style(served.tokenizer, body, answers)
    choices = [style.choice(i, answer) for i, answer in enumerate(answers)]
    fields = Frame(served, "text_completion", identity.response("cmpl"), created).fields
    counts = usage(answers, body.only_echo, body.return_cached_tokens_details)
    return fields | {"choices": choices, "usage": counts}


def completion_requests(served: Served, body: CompletionRequest, name: str, *, clamp: bool = False) -> list[Request]:
    """Return a request for each prompt, its ``n`` still to be spread.

    ``clamp`` shortens answers that would not fit, also where max_tokens is given. Raises ApiError, RequestError.
    """
    params = body.sampling(
        {"max_tokens": COMPLETION_MAX_TOKENS, **served.tokenizer.facts.sampling},
        max_tokens=body.token_limit,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprob_count,
    )
    prompts, session = body.prompts, body.session
    if session is not None and len(prompts) > 1:
        message = f"{len(prompts)} prompts are no session, which is one conversation; send one prompt, or no session_id"
        raise ApiError(400, message, param="session_id", code="invalid_value")
    return [
        prepare(
            served.tokenizer,
            prompt,
            params,
            served.limits,
            request_id=f"{name}-{i}",
            add_special_tokens=body.add_special_tokens is not False,
            # The default is ours to shorten; what a client asked for is not.
            clamp=clamp or body.max_tokens is None,
            field="prompt" if len(prompts) == 1 else f"prompt[{i}]",
            cache_salt=body.cache_salt,
            session=session,
        )
        for i, prompt in enumerate(prompts)
    ]


class _Style:
    """Writes the choices of one completion as its request wants them."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest, answers: Sequence[Shown]) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._answers = answers
        firsts = accumulate(int(answer.request.choice == 0) for answer in answers)
        self._prompts = [body.prompts[number - 1] for number in firsts]
        by_id = bool(body.return_tokens_as_token_ids)
        self._logprobs = [CompletionLogprobs(by_id) for _ in answers]

    def choice(self, index: int, answer: Shown) -> dict[str, Any]:
        """Return a complete choice."""
        output, body = answer.output, self._body
        text = "" if body.only_echo else output.text
        entries: list[Logprobs] | None = None
        if answer.request.params.wants_logprobs:
            entries = [
                *(self._prompt_entries(answer) if body.echo else ()),
                *(() if body.only_echo else output.logprobs),
            ]
        found = {
            "index": index,
            "text": (self._prompt_text(index) if body.echo else "") + text,
            "logprobs": self._logprobs[index].render(entries, self._first(answer) if body.echo else None),
            "finish_reason": "length" if body.only_echo else output.finish_reason,
            "stop_reason": None if body.only_echo else output.stop_reason,
        }
        if body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(self._first_answer(answer).output.prompt_logprobs)
        if body.return_token_ids:
            found["prompt_token_ids"] = answer.request.prompt
            found["token_ids"] = [] if body.only_echo else output.token_ids
        return found

    def opening(self, index: int, answer: Shown) -> bytes | None:
        """Return the choice with the prompt as JSON, None if it is not wanted back."""
        body = self._body
        if not body.echo and not body.return_token_ids:
            return None
        entries = self._prompt_entries(answer) if body.echo and body.logprobs is not None else None
        found = {
            "index": index,
            "text": self._prompt_text(index) if body.echo else "",
            "logprobs": self._logprobs[index].render(entries, self._first(answer)),
            "finish_reason": "length" if body.only_echo else None,
            "stop_reason": None,
        }
        if body.return_token_ids:
            found |= {"prompt_token_ids": answer.request.prompt, "token_ids": []}
        return orjson.dumps(found)

    def chunk(self, index: int, answer: Shown, delta: Delta) -> bytes:  # noqa: ARG002
        """Return a streamed choice as JSON."""
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            index,
            orjson.dumps(delta.text),
            orjson.dumps(self._logprobs[index].render(delta.logprobs)),
            orjson.dumps(delta.finish_reason),
            orjson.dumps(delta.stop_reason),
            b',"token_ids":' + orjson.dumps(delta.token_ids) if self._body.return_token_ids else b"",
        )

    def _prompt_text(self, index: int) -> str:
        """Return the prompt as it came; of token ids, and where it was shortened, the text that it has."""
        prompt = self._prompts[index]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._answers[index].request.prompt, skip_special_tokens=False)

    def _prompt_entries(self, answer: Shown) -> list[Logprobs]:
        return self._first_answer(answer).output.prompt_logprobs or []

    def _first_answer(self, answer: Shown) -> Shown:
        """Return the answer that the prompt's log-probabilities came with: the first to the same prompt."""
        return next(one for one in self._answers if one.request.prompt is answer.request.prompt)

    def _first(self, answer: Shown) -> Alternative:
        """Return the prompt's first token, which nothing comes before that could give it a probability."""
        token_id, tokenizer = answer.request.prompt[0], self._tokenizer
        return Alternative(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), 0.0, None)
