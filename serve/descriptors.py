"""How many connections the process's limit of open files leaves room for."""

from __future__ import annotations

import resource
from dataclasses import dataclass

OWN_FILES = 64
"""sockets, pipes and files of the process itself"""
MAX_BACKLOG = 256


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """``most`` connections at a time; ``backlog``: how many more may come at once before one has to give way."""

    most: int
    backlog: int


def connection_limits(capacity: int) -> ConnectionLimits:
    """Return the limits of a server of ``capacity`` requests; raises the soft limit of open files as they need."""
    wanted = 4 * capacity + 256
    need = wanted + MAX_BACKLOG + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = need if soft == resource.RLIM_INFINITY else soft
    backlog = min(MAX_BACKLOG, files // 4)
    return ConnectionLimits(most=max(1, min(wanted, files - OWN_FILES - backlog)), backlog=backlog)
