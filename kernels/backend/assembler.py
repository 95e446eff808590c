"""Which assembler turns Triton's kernels into machine code.

Triton brings two, and takes the older one for cards before Blackwell. That of Triton 3.6, of CUDA 12.8, gave wrong code
on sm_90 for three chunk kernels (`prepare` of delta_rule over 16 or 32 channels, `ssm_segments` over odd sizes): right
without optimizations, and right by those of CUDA 12.9 and 13.0 from the same input.
"""

from __future__ import annotations

import os

LEAST = (12, 9)
PATH = "TRITON_PTXAS_PATH"
"""What Triton reads, and so do the processes that compile for it."""


def choose_assembler() -> str | None:
    """Let Triton take the newer assembler if the other one is older than LEAST; return the version it takes then.

    A path that the environment names stands. None without Triton.
    """
    try:
        import triton
    except ImportError:
        return None
    tools = triton.knobs.nvidia
    newer = getattr(tools, "ptxas_blackwell", None)
    if PATH not in os.environ and newer is not None and _number(tools.ptxas.version) < LEAST:
        os.environ[PATH] = newer.path
    return str(tools.ptxas.version)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
