"""What a number depends on besides the deployment: versions, machine, revision of the sources."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from treadle.conf.schema import HardwareConfig
from treadle.graph.memory import MemoryPlan

PACKAGES = ("treadle", "torch", "triton", "numpy")
ROOT = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that compute; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine(hardware: HardwareConfig) -> dict[str, Any]:
    """Return the device's name, threads and features, and how busy the machine was before."""
    return {
        "device": hardware.device,
        "name": hardware.name,
        "threads": hardware.threads,
        "features": list(hardware.features or ()),
        "memory_bytes": int(hardware.memory),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
    }


def memory(plan: MemoryPlan, ready_bytes: int, end_bytes: int) -> dict[str, int]:
    """Return bytes planned for tensors, and reserved for them once all was ready and at the end; {} if none were."""
    if not ready_bytes:
        return {}
    planned = sum(row.nbytes for row in plan.rows if row.kind != "runtime")
    return {"planned_bytes": planned, "ready_bytes": ready_bytes, "end_bytes": end_bytes}


def revision() -> str | None:
    """Return the commit of the sources, ``+`` behind it if they differ from it; None outside a repository of theirs."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != ROOT:
        return None
    commit = _git("rev-parse", "HEAD")
    return f"{commit}+" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
