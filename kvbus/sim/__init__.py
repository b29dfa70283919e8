"""The chaos harness: many engines' real protocol code, faults from a seed, laws checked at every step.

In virtual time (:mod:`kvbus.sim.life`) messages and their codec, matcher, arrivals, registrar, leases, membership and
ranks are real; the bus, vLLM, the data plane and time are played, and a seed gives the same life every time. In real
time (:mod:`kvbus.sim.live`) the shells are real, too, and the nats-server; vLLM and the data plane are played.
"""
