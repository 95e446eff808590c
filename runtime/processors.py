"""Logits processors: Python that a user installs and a request names, run on the device for its row alone.

An entry point of ``treadle.logits_processors`` is a class (or function) that is called with the request's arguments
and returns the logits to use, or None for those it was given; perhaps once more behind the last token. It sees the
logits before forbidden tokens, biases, penalties and temperature. The host does not wait for it, so reading a value
(``.item()``) costs the overlap of steps. What it raises ends its request and no other. Steps without a processor's
request are as fast as if none existed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from treadle.conf.errors import nearest
from treadle.graph.processors import GROUP, installed_processors
from treadle.runtime.params import RequestError

if TYPE_CHECKING:
    from torch import Tensor

Processor = Callable[["Tensor", "Tensor"], "Tensor | None"]


class RowProcessors:
    """The processors of one answer, in the order in which its request names them."""

    def __init__(self, processors: Mapping[str, Processor]) -> None:
        self._processors = dict(processors)
        self.failure: str | None = None
        """what one of them raised"""

    def apply(self, token_ids: Tensor, logits: Tensor) -> None:
        """Change a row of ``logits`` [V] in place; it holds nothing finite once a processor has failed."""
        for name, processor in self._processors.items():
            try:
                result = processor(token_ids, logits)
                if result is not None and result is not logits:
                    if result.shape != logits.shape:
                        raise ValueError(f"returned logits of shape {[*result.shape]}, not {[*logits.shape]}")
                    logits.copy_(result)
            except Exception as error:
                self.failure = f"logits processor {name} failed: {type(error).__name__}: {error}"
                logits.fill_(float("nan"))
                return


def check_processors(names: Mapping[str, Any] | None) -> None:
    """Raise RequestError for the first name that no installed processor has."""
    known = installed_processors()
    for name in names or ():
        if name not in known:
            close = nearest(name, list(known))
            hint = f"; did you mean {close[0]}?" if close else f"; installed: {', '.join(known) or 'none'}"
            raise RequestError(
                f"logits_processors: no entry point of {GROUP} is called {name!r}{hint}", "logits_processors"
            )


def make_processors(wanted: Mapping[str, Mapping[str, Any]] | None) -> RowProcessors | None:
    """Return what a request asks for, None if that is nothing. Raises RequestError."""
    if not wanted:
        return None
    check_processors(wanted)
    made: dict[str, Processor] = {}
    for name, arguments in wanted.items():
        try:
            made[name] = installed_processors()[name].load()(**arguments)
        except Exception as error:  # foreign code: whatever it raises is about these arguments, or its installation
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"logits_processors: {name} refuses {dict(arguments)}: {reason}", "logits_processors"
            ) from error
    return RowProcessors(made)
