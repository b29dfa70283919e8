"""What the simulated engines of one run share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbus.metrics import Counters
from kvbus.sim.fabric import Fabric
from kvbus.sim.runtime import Runtime
from kvbus.sim.timing import Timing


@dataclass(frozen=True, slots=True)
class World:
    """What the engines of one run share. ``counters`` are those of all their ranks."""

    runtime: Runtime
    timing: Timing
    fabric: Fabric
    counters: Counters = field(default_factory=Counters)
