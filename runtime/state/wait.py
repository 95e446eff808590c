"""What has been done about the state of a sequence since it began to wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treadle.runtime.state.tiers.ticket import Ticket, Where

if TYPE_CHECKING:
    from treadle.runtime.sequence import Sequence


@dataclass(slots=True)
class Wait:
    """From a sequence's arrival, or its preemption, until it comes in."""

    looked: bool = False
    """tiers were asked while it stood further back in the queue"""
    sent: tuple[int, Ticket] | None = None
    """tokens that were found then, and their way to host memory"""
    heard: dict[bytes, Where | None] = field(default_factory=dict)
    """what connectors have said while not all is known yet"""
    joined: Sequence | None = None
    """whose state, on its way from tiers, it waits for, since it begins with the same"""
    coming: dict[int, int] = field(default_factory=dict)
    """whole pages by group that are kept for it: those on their way from tiers, and those before"""
    lacks: dict[int, int] = field(default_factory=dict)
    """items by kind for what tiers have, where there was no room for them"""
    asked: bool = False
    """tiers have been asked, and what they had has come or failed"""
    near: int = 0
    """tokens whose state was on the device when it wanted to come in last"""
    restored: dict[str, int] = field(default_factory=dict)
    """tokens that tiers brought back, by tier"""
    failed: int = 0
    """tokens that a tier had and did not give"""
