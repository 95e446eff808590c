"""Where Triton keeps what it compiles.

inductor names a folder if nobody else has: one inside of what it compiles at that moment, where the next process does
not look. Every kernel was then compiled again at the second start.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "TRITON_CACHE_DIR"
"""What Triton and inductor read, and so do the processes that compile for them."""

_named = os.environ.get(FOLDER)


def keep_kernels(folder: Path) -> None:
    """Let Triton keep its kernels in ``folder`` from now on; one that the environment names stands."""
    if _named is None:
        os.environ[FOLDER] = str(folder.absolute())
