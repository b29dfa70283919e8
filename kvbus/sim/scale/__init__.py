"""``kvbus scale``: many engines without a GPU behind one router and one nats-server, and what that costs.

Real are the router, the nats-server, every connection and message on the bus, and the HTTP APIs. Simulated are what
vLLM computes, and the memory that KV is written into. The engines are dealt to a few processes; the client has its own.
"""
