"""A deterministic simulator of kvbus: real protocol code, faults drawn from a seed, invariants checked at every step.

In virtual time (:mod:`kvbus.sim.virtual`) messages and their codec, matcher, arrivals, registrar, leases, membership
and ranks are real; bus, vLLM, data plane and time are simulated, and a seed gives the same run every time. In real time
(:mod:`kvbus.sim.realtime`) the shells and the nats-server are real, too; the order of events depends on the machine.
:mod:`kvbus.sim.scale` measures, without faults, what many engines cost.
"""
