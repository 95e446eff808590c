"""Which assembler turns Triton's kernels into machine code.

Triton brings two, and takes the older one for cards before Blackwell. That of Triton 3.6, of CUDA 12.8, gave wrong code
on sm_90 for two chunk kernels in some sizes and numbers of warps (docs/decisions/0024). Of those that were tried with
that of 12.9 or 13.0 all were right.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os

_log = logging.getLogger(__name__)

LEAST = (12, 9)
PATH = "TRITON_PTXAS_PATH"
"""What Triton reads, and so do the processes that compile for it."""


def choose_assembler(arch: int, driver: int) -> str | None:
    """Let Triton take the newer assembler if the other one is older than LEAST; return the version it takes then.

    ``arch`` is the device's, 90 for sm_90, and ``driver`` the ``driver_major``: code of a later one is invalid to it.
    A path that the environment names stands, if there is an assembler. None if there is none that runs: Triton says why
    when it compiles.
    """
    try:
        from triton import knobs
        from triton.backends.nvidia.compiler import get_ptxas

        taken = get_ptxas(arch)
    except (ImportError, OSError, RuntimeError):
        return None
    if _number(taken.version) < LEAST and taken.path != os.environ.get(PATH):
        with contextlib.suppress(OSError, RuntimeError):
            newer = knobs.nvidia.ptxas_blackwell
            if _number(taken.version) < _number(newer.version) < (driver + 1,):
                os.environ[PATH] = newer.path
    version = str(get_ptxas(arch).version)
    if _number(version) < LEAST:
        least = ".".join(map(str, LEAST))
        _log.warning(
            "ptxas %s gives wrong code for some kernels; name one of CUDA %s or newer in %s", version, least, PATH
        )
    return version


def driver_major() -> int:
    """Return the CUDA whose code the driver loads, 12 for all of 12. Raises OSError without a driver."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
