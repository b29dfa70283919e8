"""A cluster on this machine: nats-server, vLLM engines and router as child processes, a model, and load on them.

Here is what starts processes and ends them. Whatever is started is a child in a process group of its own and is gone
with its parent. Nothing here is needed in production, but for ``kvbus engine`` and ``kvbus drain``.
"""

from __future__ import annotations

from kvbus.local import bench, drain
from kvbus.local.cluster import TRACES, Cluster
from kvbus.local.demo import run_demo
from kvbus.local.engine import EnginePlan, default_engine_id, run_engine
from kvbus.local.load import make_prompt
from kvbus.local.model import cache_dir, check_model_dir, smollm2, tiny
from kvbus.local.nats_server import NatsServer
from kvbus.local.process import Child, free_port, stop_all
from kvbus.local.soak import Soak, as_json, run_soak
from kvbus.local.turns import Turns

__all__ = [
    "TRACES",
    "Child",
    "Cluster",
    "EnginePlan",
    "NatsServer",
    "Soak",
    "Turns",
    "as_json",
    "bench",
    "cache_dir",
    "check_model_dir",
    "default_engine_id",
    "drain",
    "free_port",
    "make_prompt",
    "run_demo",
    "run_engine",
    "run_soak",
    "smollm2",
    "stop_all",
    "tiny",
]
