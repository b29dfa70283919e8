"""A run in virtual time: the same seed gives the same run."""

from __future__ import annotations

from kvbus.sim.engine import Engine
from kvbus.sim.fabric import Fabric
from kvbus.sim.faults import NO_FAULTS, Faults
from kvbus.sim.network import Network
from kvbus.sim.runtime import VirtualRuntime
from kvbus.sim.scenario import Scenario, Summary
from kvbus.sim.timing import VIRTUAL
from kvbus.sim.virtual_bus import VirtualBus
from kvbus.sim.virtual_engine import VirtualEngine
from kvbus.sim.world import World
from kvbus.wire import Heartbeat

CHECK_DONE_S = 1.0


def run_virtual(seed: int, faults: Faults, transfers: int) -> Summary:
    """Run to the end.

    Raises:
        Violation: an invariant was broken.
    """
    runtime = VirtualRuntime(seed, faults)
    network = Network(runtime, VIRTUAL)
    world = World(runtime, VIRTUAL, Fabric(runtime, VIRTUAL))
    bus = VirtualBus(runtime, network)

    def make_engine(own: Heartbeat) -> Engine:
        return VirtualEngine(world, bus, own)

    scenario = Scenario(seed, world, transfers, make_engine, network, bus)
    runtime.run(scenario.start())
    runtime.faults = NO_FAULTS
    settled_by = runtime.now + VIRTUAL.settle_s
    while runtime.now < settled_by and not scenario.done:
        runtime.run(runtime.now + CHECK_DONE_S)
    return scenario.check()
