"""A cluster on this machine: nats-server, vLLM engines and router as child processes, and a model to run."""
