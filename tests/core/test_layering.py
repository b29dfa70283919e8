"""Imports go down only; each library has one import site; only adapters need vLLM, NIXL or torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "kvbus").rglob("*.py"), *(ROOT / "connector").rglob("*.py")])

LAYERS = [
    {
        "errors",
        "blocks",
        "subjects",
        "fields",
        "messages",
        "bounded",
        "patience",
        "config",
        "ttft",
        "story",
        "spans",
        "otlp_json",
        "clocks",
        "refusals",
    },
    {"matching", "transfer", "matcher", "registrar", "arrivals", "membership", "lease", "sinks", "presence"},
    {
        "metrics",
        "bus",
        "memory_bus",
        "transport",
        "memory_transport",
        "tracing",
        "keys",
        "node",
        "marks",
        "rank",
        "writer",
        "signals",
        "last_words",
    },
    {"source", "sink", "nobody", "collector", "trace_file", "collect"},
    {"router", "local", "sim"},
    {"tools"},
    {"cli", "__main__"},
]
LAYER_OF = {module: number for number, modules in enumerate(LAYERS) for module in modules}
PURE = LAYERS[0] | LAYERS[1]
PURE_FILES = {f"kvbus/tools/{name}.py" for name in ("lines", "pending", "traffic")}
NOT_PURE = {"asyncio", "threading", "time", "random", "os", "logging", "socket", "queue"}
# Each library and the only places that may import it.
SITES = {
    "nats": {"kvbus/bus.py"},
    "opentelemetry": {"kvbus/tracing.py"},
    "matplotlib": {"kvbus/tools/pictures.py"},
    "msgpack": {"kvbus/messages.py", "kvbus/sim/forge.py"},
    "cryptography": {"kvbus/keys.py"},
    "prometheus_client": {"kvbus/router/meters.py", "kvbus_connector/prometheus.py"},
    "vllm": {
        "kvbus_connector/connector.py",
        "kvbus_connector/nixl_plane.py",
        "kvbus_connector/plugin.py",
        "kvbus_connector/prometheus.py",
    },
    "nixl": set(),
    "torch": {"kvbus/local/model.py", "kvbus_connector/nixl_plane.py"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} if node.module != "kvbus" else {f"kvbus.{alias.name}" for alias in node.names}
    return found


def module_of(path: Path) -> str:
    return path.relative_to(ROOT / "kvbus").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_import_site_per_library(path: Path) -> None:
    relative = str(path.relative_to(ROOT)).removeprefix("connector/")
    for name in imports(path):
        library = name.partition(".")[0]
        if library in SITES:
            assert relative in SITES[library], f"{relative} imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "kvbus").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    module = module_of(path)
    if module == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] != "kvbus_connector", f"{module} imports {name}"
        if parts[0] == "kvbus" and len(parts) > 1 and parts[1] in LAYER_OF and parts[1] != module:
            assert LAYER_OF[parts[1]] <= LAYER_OF[module], f"{module} imports {name}"
        if module in PURE or str(path.relative_to(ROOT)) in PURE_FILES:
            assert parts[0] not in NOT_PURE, f"{module} is pure and imports {name}"


def test_every_module_has_a_layer() -> None:
    assert {module_of(path) for path in (ROOT / "kvbus").rglob("*.py")} - {"__init__"} == set(LAYER_OF)


def test_nothing_needs_vllm_nixl_or_torch_but_what_adapts_them() -> None:
    adapters = {f"kvbus_connector.{name}" for name in ("connector", "nixl_plane", "prometheus")}
    names = []
    for path in SOURCES:
        parts = path.with_suffix("").relative_to(ROOT).parts
        name = ".".join(part for part in parts if part not in ("connector", "__init__"))
        if name not in adapters and not name.endswith("__main__"):
            names.append(name)
    program = (
        "import sys, importlib\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('vllm', 'nixl', 'nixl_cu12', 'torch', 'msgspec'):\n"
        "            raise ImportError(name + ' is not installed here')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
