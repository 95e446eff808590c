"""API keys: kept as a hash wherever they are written down."""

from __future__ import annotations

import hashlib
import hmac
import re

_SEALED = "sha256:"


def seal(key: str) -> str:
    """Return ``sha256:HEX`` of a key; a sealed one as it is."""
    return key if key.startswith(_SEALED) else _SEALED + hashlib.sha256(key.encode()).hexdigest()


def is_sealed_wrongly(key: str) -> bool:
    """Whether ``key`` begins like a sealed one and holds no hash, so that nothing would open it."""
    return key.startswith(_SEALED) and re.fullmatch(r"[0-9a-f]{64}", key.removeprefix(_SEALED)) is None


def opens(configured: str, given: str) -> bool:
    """Whether ``given`` is the key that ``configured`` holds, plain or sealed. Takes equal time for all wrong keys."""
    digest = _SEALED + hashlib.sha256(given.encode()).hexdigest()
    return hmac.compare_digest(seal(configured), digest)
