"""What bodies accept: fields that are honoured, hints that change nothing, and fields refused by name.

Nothing is ignored in silence: a field is honoured, or known to be without effect here, or the answer is a 400.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict

from treadle.serve.errors import ApiError, clip


class Fields(BaseModel):
    """A body. Its own fields are honoured; ``hints`` are accepted, and ``neutral`` only where it asks for nothing."""

    # Unknown fields are for `refuse_unknown`, which stops at the first one and names the nearest known one.
    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())

    hints: ClassVar[frozenset[str]] = frozenset()
    """fields that change nothing here, whatever they hold"""
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """fields that are not supported, with the values (beside null) that ask for nothing"""
    elsewhere: ClassVar[dict[str, str]] = {}
    """fields that another route takes, with that route"""

    model: str | None = None

    @classmethod
    def refuse_unknown(cls, fields: Mapping[str, Any]) -> None:
        """Raise ApiError for the first field of a body that is unknown, or known and not supported."""
        # A field that is refused too is no advice, so the nearest is never one of ``neutral``.
        known = (*cls.model_fields, *cls.hints)
        for name, value in fields.items():
            if name in cls.elsewhere:
                message = f"{name} is a field of {cls.elsewhere[name]}, not of this route"
                raise ApiError(400, message, param=name, code="unknown_parameter")
            if name not in cls.neutral:
                check_known(name, known)
            elif value is not None and not any(_same(value, choice) for choice in cls.neutral[name]):
                allowed = " or ".join(orjson.dumps(choice).decode() for choice in (*cls.neutral[name], None))
                message = f"{name} is not supported; leave it out or send {allowed}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")


def check_known(name: str, known: Iterable[str], where: str = "") -> None:
    """Raise ApiError, naming the nearest, if ``name`` is not one of ``known``; ``where`` stands before it."""
    known = tuple(known)
    if name in known:
        return
    name = clip(name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ApiError(400, f"unknown field {where + name!r}{hint}", param=where + name, code="unknown_parameter")


def _same(value: Any, choice: Any) -> bool:
    """Whether a value is the one that asks for nothing; JSON's true is not 1."""
    return isinstance(value, bool) == isinstance(choice, bool) and bool(value == choice)
