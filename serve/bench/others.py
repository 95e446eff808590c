"""How much of the machine other processes take while something is measured, from Linux's /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

DISTURBED = 0.1
"""share of the machine above which what others take spoils a measurement"""

LOOK_S = 0.25
PROC = Path("/proc")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Others:
    """Watches the processes that are neither this one nor its descendants."""

    def __init__(self) -> None:
        self._since = self._read()

    def share(self) -> float:
        """Return the share of all cores that others took since the last call, or since this was made; 0 if unknown."""
        before, self._since = self._since, self._read()
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._since, before))
        # Over a short while the ticks of /proc may say more than there was.
        return min(max(busy_s - own_s, 0.0) / max(wall_s * (os.cpu_count() or 1), 1e-9), 1.0)

    def quiet(self) -> bool:
        """Return whether others took little of the machine since the last call."""
        return self.share() <= DISTURBED

    def wait_for_quiet(self, deadline_s: float) -> None:
        """Return when others take little of the machine, or at ``deadline_s`` on the clock of time.monotonic."""
        while time.monotonic() < deadline_s:
            time.sleep(min(LOOK_S, max(deadline_s - time.monotonic(), 0.0)))
            if self.quiet():
                return
        self.share()

    def _read(self) -> tuple[float, float, float]:
        """Return seconds: of the clock, that all cores were busy, that our processes ran."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(
                int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
            )
            busy_s = (user + nice + system + irq + softirq + steal) * _TICK_S
            return time.perf_counter(), busy_s, _tree_s(os.getpid())
        except (OSError, ValueError):
            return time.perf_counter(), 0.0, 0.0


def _tree_s(pid: int) -> float:
    """Return the seconds that a process, the children that it has waited for and those that live have run."""
    # The name in the second field may hold anything; the fields that follow it begin behind the last bracket.
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    own_s = sum(map(int, fields[11:15])) * _TICK_S
    children = [
        child for task in (PROC / str(pid) / "task").iterdir() for child in (task / "children").read_text().split()
    ]
    return own_s + sum(_tree_s(int(child)) for child in children)
