"""One served model as the text side knows it: what turns a body into requests, wherever they then run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treadle.conf.schema import ServeConfig
from treadle.runtime.text.prompt import Limits
from treadle.runtime.text.template import ChatTemplate
from treadle.runtime.text.tokenizer import Tokenizer
from treadle.serve.errors import ApiError, clip


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model's name, its tokenizer and template, and the limits of its requests."""

    name: str
    fingerprint: str
    created: int
    """seconds since the epoch"""
    tokenizer: Tokenizer
    template: Callable[[], ChatTemplate]
    """raises RequestError if the model has no chat template"""
    limits: Limits
    config: ServeConfig

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if a request asks for another model."""
        if name is not None and name != self.name:
            message = f"the model {clip(name)!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
