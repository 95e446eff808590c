"""The seal of an object that leaves this process: 256 bytes before it, by which wrong bytes are recognised.

A seal names the object's key, its length, the model and layout that it is of, and a hash of its bytes.
"""

from __future__ import annotations

import hashlib
import struct

SEAL_BYTES = 256
"""As much as a unit of the arena, so that objects behind seals are aligned as they are there."""

_MAGIC = b"treadle\x01"
_FORM = struct.Struct("<8sQ16s16s32s")
_DIGEST_BYTES = 16


def namespace(model: str, layout: str) -> bytes:
    """Return 16 bytes that differ when the checkpoint's hash or the description of the layout does."""
    return hashlib.sha256(f"{len(model)}:{model}{layout}".encode()).digest()[:16]


def write_seal(target: memoryview, payload: memoryview, *, key: bytes, scope: bytes) -> None:
    """Fill ``target`` [256] with the seal of ``payload``."""
    head = _FORM.pack(_MAGIC, len(payload), key, scope, hashlib.sha256(payload).digest())
    padded = head.ljust(SEAL_BYTES - _DIGEST_BYTES, b"\0")
    target[:] = padded + hashlib.sha256(padded).digest()[:_DIGEST_BYTES]


def check_seal(sealed: memoryview, *, key: bytes, scope: bytes) -> bool:
    """Whether ``sealed`` is a seal and the very bytes that were sealed under this key, model and layout."""
    head, payload = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    padded, digest = head[:-_DIGEST_BYTES], head[-_DIGEST_BYTES:]
    if hashlib.sha256(padded).digest()[:_DIGEST_BYTES] != digest:
        return False
    magic, length, its_key, its_scope, its_hash = _FORM.unpack_from(padded)
    if (magic, length, its_key, its_scope) != (_MAGIC, len(payload), key, scope):
        return False
    return bool(hashlib.sha256(payload).digest() == its_hash)
