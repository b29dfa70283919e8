"""A local cluster: nats-server, prefill and decode engines and the router, as children of this process."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvbus.config import Config, check_nats_url
from kvbus.errors import LocalClusterError
from kvbus.local.model import check_model_dir
from kvbus.local.nats_server import NatsServer
from kvbus.local.observer import Observer
from kvbus.local.process import Child, check_port_free, free_port, stop_all
from kvbus.wire import State

HOST = "127.0.0.1"
BOOT_TIMEOUT_S = 600.0
TRACES = "traces.jsonl"
ROUTER = "router"
GRACE_S = 8  # of the router: less than children get to end, so that it can break off requests in good order
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The worker runs in the scheduler's process, as on one GPU: one process less imports vLLM, which takes 10 s.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "UCX_TLS": "tcp,self,sm",
}
ENVIRONMENT = {"KVBUS_DUMP_ON_SIGUSR1": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# In bfloat16 an engine's answers depend on what else is in its batch, and on some CPUs (AMX) vLLM 0.32 gets them wrong.
CPU_ARGUMENTS = ("--enforce-eager", "--dtype", "float32")

Say = Callable[[str], None]


def on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One vLLM engine. ``transfer`` is its ``--kv-transfer-config``, None for an engine by itself."""

    name: str
    model: Path
    served_name: str
    transfer: dict[str, Any] | None = None
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


def engine_command(spec: EngineSpec, host: str, port: int) -> list[str]:
    """The command line of a vLLM API server."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(spec.model), "--served-model-name", spec.served_name]
    command += ["--host", host, "--port", str(port), *(CPU_ARGUMENTS if on_cpu() else ())]
    if spec.transfer is not None:
        command += ["--kv-transfer-config", json.dumps(spec.transfer)]
    endpoints = (os.environ.get(f"OTEL_EXPORTER_OTLP_{part}ENDPOINT") for part in ("TRACES_", ""))
    if endpoint := next(filter(None, endpoints), ""):
        command += ["--otlp-traces-endpoint", endpoint]  # vLLM's own spans go where kvbus's do
    return [*command, *spec.arguments]


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """What such an engine needs beside this process's own environment."""
    return {**ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu() else {}), **spec.environment}


class Engine:
    """A running vLLM API server."""

    def __init__(self, spec: EngineSpec, logs: Path) -> None:
        self.spec, self.port = spec, free_port()
        self.child = Child(spec.name, engine_command(spec, HOST, self.port), logs, engine_environment(spec))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def healthy(self) -> bool:
        return is_healthy(self.port)


def is_healthy(port: int, path: str = "/health") -> bool:
    """Whether a GET of ``path`` on this host's ``port`` answers 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_until(
    ready: Callable[[], bool], children: Sequence[Child], what: str, say: Say, timeout_s: float = BOOT_TIMEOUT_S
) -> None:
    """Wait for ``ready()``, saying so every five seconds; fail at once if a child ends."""
    started = said = time.monotonic()
    while not ready():
        for child in children:
            child.check()
        now = time.monotonic()
        if now - started > timeout_s:
            tails = "\n".join(f"--- the end of {child.log}\n{child.tail()}" for child in children)
            raise LocalClusterError(f"kvbus: {what}: not ready after {timeout_s:.0f} s\n{tails}")
        if now - said >= 5:
            said = now
            say(f"{what}: {now - started:.0f} s")
        time.sleep(0.1)


class Cluster:
    """See the module's docstring; entered and left as a context. Everything it started ends with it.

    Args:
        model: a model's folder.
        prefill, decode: how many engines of each kind.
        nats_url: a running server to use; None starts one.
        port: of the router on 127.0.0.1; 0 takes a free one.
        arguments: further arguments of every engine; ``prefill_arguments`` and ``decode_arguments`` of one kind.
        extra: added to every engine's ``kv_connector_extra_config``.
        transfer: added to every engine's ``--kv-transfer-config``.
        environment: added to every engine's environment.
        say: told what is going on.
    """

    def __init__(
        self,
        model: Path,
        logs: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        nats_url: str | None = None,
        port: int = 0,
        arguments: Sequence[str] = (),
        prefill_arguments: Sequence[str] = (),
        decode_arguments: Sequence[str] = (),
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self.model, self.logs, self.say = check_model_dir(model), logs, say
        self.served_name = model.name
        self._counts = {"prefill": prefill, "decode": decode}
        self._nats_url, self._port, self._extra = nats_url, port, extra or {}
        self._transfer, self._environment = transfer or {}, environment or {}
        self._arguments = {
            "prefill": [*arguments, *prefill_arguments],
            "decode": [*arguments, *decode_arguments],
        }
        if nats_url is not None:
            check_nats_url("--nats-url", nats_url)
        self.engines: dict[str, Engine] = {}
        self.nats: NatsServer | None = None
        self._children: list[Child] = []

    @property
    def trace_file(self) -> Path:
        """Where the router keeps the last traces."""
        return self.logs / TRACES

    @property
    def url(self) -> str:
        """The router's, without a path."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Raise LocalClusterError if a process of the cluster has ended."""
        for child in self._children:
            child.check()

    def close(self) -> None:
        """End every process, each while those that it needs are still there; idempotent."""
        if hasattr(self, "observer"):
            self.observer.close()
        nats = [self.nats.child] if self.nats is not None else []
        routers = [child for child in self._children if child.name == ROUTER]
        engines = [child for child in self._children if child not in (*nats, *routers)]
        for wave in (routers, engines, nats):
            stop_all(wave)
        self._children.clear()

    def start_engine(self, name: str) -> Engine:
        """Start the engine ``prefill-N`` or ``decode-N``, again if it has ended."""
        kind = name.partition("-")[0]
        transfer = {
            "kv_connector": "KVBusConnector",
            "kv_role": "kv_producer" if kind == "prefill" else "kv_consumer",
            "engine_id": name,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"nats_url": self.nats_url, **self._extra},
            **self._transfer,
        }
        spec = EngineSpec(name, self.model, self.served_name, transfer, self._arguments[kind], self._environment)
        engine = Engine(spec, self.logs)
        self._children.append(engine.child)
        self.engines[name] = engine
        return engine

    def forget(self, name: str) -> None:
        """End an engine and no longer ask for it to be alive."""
        engine = self.engines.pop(name)
        engine.child.stop()
        self._children.remove(engine.child)

    def replace_nats(self, server: NatsServer) -> None:
        """Take another server, at the same address, for the one that ended."""
        if self.nats is not None:
            self.nats.stop()
            self._children.remove(self.nats.child)
        self.nats = server
        self._children.append(server.child)

    def _start(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.port = self._port or free_port()
        check_port_free(HOST, self.port)
        if self._nats_url is None:
            self.nats = NatsServer(self.logs)
            self._children.append(self.nats.child)
            self.nats_url = self.nats.url
        else:
            self.nats_url = self._nats_url
        self.say(f"NATS at {self.nats_url}; logs in {self.logs}")
        self.observer = Observer(Config(nats_url=self.nats_url))
        for kind, count in self._counts.items():
            for number in range(count):
                self.start_engine(f"{kind}-{number}")
        router = [sys.executable, "-m", "kvbus", "router", "--nats-url", self.nats_url, "--port", str(self.port)]
        router += ["--trace-file", str(self.trace_file), "--notice-s", "0", "--grace-s", str(GRACE_S)]
        self.router = Child(ROUTER, router, self.logs)
        self._children.append(self.router)
        self.wait_ready()

    def wait_ready(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Wait until every engine and the router serve."""
        names = list(self.engines)
        wait_until(
            lambda: all(self.is_ready(name) for name in names) and is_healthy(self.port, "/ready?pairs=1"),
            self._children,
            f"booting {len(names)} engines and the router",
            self.say,
            timeout_s,
        )

    def is_ready(self, name: str) -> bool:
        """Whether this engine's running process says on the bus that it is ready.

        Of data parallel ranks, whose engine ids end with the rank, each that was heard must say so.
        """
        own = f":{self.engines[name].port}"
        ranks = [each for each in list(self.observer.engines.values()) if each.address.endswith(own)]
        return bool(ranks) and all(each.state is State.READY for each in ranks)
