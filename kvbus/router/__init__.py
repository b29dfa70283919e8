"""The HTTP front door: finds engines on the bus, sends each request to a prefill and a decode engine at once."""
