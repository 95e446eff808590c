"""Where treadle keeps what can be made or fetched again: checkpoints and compiled bodies."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return treadle's folder in the user's cache directory; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "treadle"
