"""POST /tokenize and /detokenize, in the shapes of vLLM's."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.runtime.text.prompt import SLICE_CHARS, SUSPECT_CHARS
from treadle.serve.errors import ApiError
from treadle.serve.events import until_left
from treadle.serve.openai.body import read_body
from treadle.serve.openai.fields import Fields
from treadle.serve.openai.messages import Conversation, Messages
from treadle.serve.served import Served
from treadle.serve.service import Service


class TokenizeRequest(Fields):
    """Body of /tokenize: a prompt or messages."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"tools": ([],), "mm_processor_kwargs": ({},)}

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """null: true for a prompt, false for messages, whose template writes them"""
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def text(self, served: Served) -> str:
        """Return the text to tokenize. Raises ApiError, RequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "either prompt or messages must be given", param="prompt", code="invalid_value")
        if self.prompt is not None:
            return self.prompt
        conversation = Conversation(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=self.documents,
        )
        return conversation.render(served).text


class DetokenizeRequest(Fields):
    """Body of /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    skip_special_tokens: bool = False


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """Answer with the tokens of a text; it may be longer than the context. Raises ApiError."""
    body, size = await read_body(http, TokenizeRequest, service.max_body_bytes)
    service.check_model(body.model)
    return _json(await until_left(http, service.off_loop(partial(_tokens, service, body), size)))


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """Answer with the text of tokens. Raises ApiError."""
    body, size = await read_body(http, DetokenizeRequest, service.max_body_bytes)
    service.check_model(body.model)
    return _json(await until_left(http, service.off_loop(partial(_text, service, body), size)))


def _tokens(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    text = body.text(service)
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    most = max(SLICE_CHARS, SUSPECT_CHARS * service.limits.max_len)
    if len(text) > most:
        message = f"the text has {len(text)} characters; at most {most} are tokenized, far more than the context holds"
        field = "messages" if body.prompt is None else "prompt"
        raise ApiError(400, message, param=field, code="invalid_value")
    ids = service.tokenizer.encode(text, special)
    core = service.tokenizer.core
    strings = [core.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.limits.max_len, "tokens": ids, "token_strs": strings}


def _text(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    vocab = max(service.limits.vocab, service.tokenizer.vocab_size)
    for i, token_id in enumerate(body.tokens):
        if token_id >= vocab:
            at = f"tokens[{i}]"
            raise ApiError(400, f"{at}={token_id} is not a token id in [0, {vocab})", param=at, code="invalid_value")
    return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)}


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
