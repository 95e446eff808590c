"""What state is called outside the device: hashes of all the tokens that it depends on.

Pages are chained, each hash covers those before it. A model's weights and layout are the tiers' business.
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b

SIZE = 16
"""bytes of a digest"""


def seed(salt: Hashable) -> bytes:
    """Return the digest of no tokens under a salt."""
    return blake2b(repr(salt).encode(), digest_size=SIZE, person=b"salt").digest()


def chain(digest: bytes, data: bytes, page_bytes: int) -> list[bytes]:
    """Return the digest at the end of each page of ``data``, which follows what ``digest`` is of."""
    digests = []
    for begin in range(0, len(data), page_bytes):
        digest = blake2b(digest + data[begin : begin + page_bytes], digest_size=SIZE).digest()
        digests.append(digest)
    return digests


def item_key(digest: bytes, kind: int, tail: bytes = b"") -> bytes:
    """Return the key of an item of the ``kind``-th kind behind the page of ``digest`` and the tokens ``tail``."""
    if kind == 0 and not tail:
        return digest
    return blake2b(digest + tail, digest_size=SIZE, person=b"item%d" % kind).digest()
