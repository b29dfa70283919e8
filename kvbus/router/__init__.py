"""The HTTP front door: finds engines on the bus, sends each request to a prefill and a decode engine at once.

``router.http`` speaks HTTP with clients and engines, ``router.fleet`` knows the engines and chooses among them,
``router.request`` takes one request through them; here is what puts these together, and admission. Routers share
nothing: whatever one forgets costs time, never an answer.
"""
