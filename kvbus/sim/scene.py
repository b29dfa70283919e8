"""What the simulated engines of one life share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbus.metrics import Counters
from kvbus.sim.plane import Fabric
from kvbus.sim.stage import Pace, Stage
from kvbus.sim.weather import Weather


@dataclass(frozen=True, slots=True)
class Scene:
    """What the engines of one life share. ``counters`` are those of their ranks.

    Without a ``weather`` messages on a real bus are just as a real engine's.
    """

    stage: Stage
    pace: Pace
    fabric: Fabric
    weather: Weather | None = None
    counters: Counters = field(default_factory=Counters)
