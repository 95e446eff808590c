"""Runs a program: requests in, tokens out. ``LLM`` and ``SamplingParams`` are what a script needs.

Names are imported when they are first used, so that the text side works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.runtime.completion import CompletionOutput, RequestOutput
    from treadle.runtime.llm import LLM
    from treadle.runtime.params import RequestError, SamplingParams
    from treadle.runtime.request import SessionHint
    from treadle.runtime.text.prompt import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SessionHint",
    "TextPrompt",
    "TokensPrompt",
]

_HOME = {
    "LLM": "llm",
    "CompletionOutput": "completion",
    "RequestError": "params",
    "RequestOutput": "completion",
    "SamplingParams": "params",
    "SessionHint": "request",
    "TextPrompt": "text.prompt",
    "TokensPrompt": "text.prompt",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
