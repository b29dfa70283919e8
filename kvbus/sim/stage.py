"""Time, chance and pace of a simulated life, and one client's request in it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbus.sim.faults import Faults


class Stage(Protocol):
    """Time and chance: virtual in :class:`kvbus.sim.world.World`, real in :class:`kvbus.sim.live_stage.LiveStage`.

    Threading: everything of a life happens in one thread.
    """

    faults: Faults
    chance: random.Random
    counts: Counter[str]
    """What happened, for the summary."""

    @property
    def now(self) -> float:
        """Seconds since the life began."""
        ...

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        """Do it after so many seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a life is.

    Attributes:
        wait: factor of all that engines wait for: leases, heartbeats, patience, the length of faults.
        work: factor of what they compute, and of the time between requests and between faults.
        lead_s: from the start to the first request.
        calm_s: how long the end may take, without faults.
    """

    wait: float
    work: float
    lead_s: float
    calm_s: float

    @property
    def beat_s(self) -> float:
        return 0.5 * self.wait

    @property
    def dead_after_s(self) -> float:
        return 3.0 * self.wait

    @property
    def block_lease_s(self) -> float:
        return 10.0 * self.wait

    @property
    def pool_hold_s(self) -> float:
        return 3.0 * self.wait

    @property
    def registration_hold_s(self) -> float:
        return 30.0 * self.wait

    @property
    def patience_s(self) -> float:
        return 8.0 * self.wait

    @property
    def cancel_timeout_s(self) -> float:
        return 1.0 * self.wait

    @property
    def write_lease_s(self) -> float:
        return 1.5 * self.wait

    @property
    def max_write_s(self) -> float:
        return 2.0 * self.wait

    @property
    def bound_s(self) -> float:
        """No request may take longer, whatever happens."""
        return 60.0 * self.wait

    @property
    def request_every_s(self) -> float:
        return 0.3 * self.work


VIRTUAL = Pace(wait=1.0, work=1.0, lead_s=3.0, calm_s=200.0)
# What kvbus does not let one set (re-sending, asking for metadata, noticing a dead server) takes its second or two also
# here, so waiting cannot be cut as short as computing.
LIVE = Pace(wait=0.4, work=0.2, lead_s=0.5, calm_s=60.0)


@dataclass(slots=True)
class Ticket:
    """One client's request, as both legs and the router know it.

    Attributes:
        watcher: told ``prefilled`` by the prefill engine, and by decode how it ended.
        lost: told that its decode engine died before the first token; whether another one takes over.
        takeover_s: how long decode waits for the router's word when a prefill engine is lost.
        junk: decode registers blocks that it does not have.
    """

    transfer_id: str
    prompt_blocks: int
    cached_blocks: int
    hint: str = ""
    attempt: int = 1
    started: float = 0.0
    watcher: Callable[[str], None] = lambda _: None
    lost: Callable[[], bool] = lambda: False
    abort_after_s: float | None = None
    takeover_s: float = 0.0
    prefill_fails: bool = False
    junk: bool = False
    source: str = ""
    sink: str = ""
    prefilled: bool = False
    ended: str = ""
    ended_at: float = 0.0
