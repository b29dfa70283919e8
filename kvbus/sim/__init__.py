"""The chaos harness: many engines' real protocol code in virtual time, faults from a seed, laws checked at every step.

What is real: messages and their codec, matcher, arrivals, registrar, leases, membership, and the rank that performs
their decisions. What is played: the bus, vLLM's engines, the data plane, time. A seed gives the same life every time.
"""
