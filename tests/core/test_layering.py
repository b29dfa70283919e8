"""The rooms of the house: what may import what, and through which door; each library has one import site."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "kvbus").rglob("*.py"), *(ROOT / "connector" / "kvbus_connector").rglob("*.py")])
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("connector.").removesuffix(".__init__"): path
    for path in SOURCES
}
GROUND = {"errors", "bounded", "metrics", "signals", "last_words", "child"}
PROTOCOL = {"protocol", "protocol.prefill", "protocol.decode"}
BELOW_ENGINE = {"ground", "config", "wire", *PROTOCOL, "bus", "trace"}
ROUTER = {"router", "router.http", "router.fleet", "router.request"}
# One row per room. "router.base" are the two modules of the router on which its rooms stand.
MAY_IMPORT: dict[str, set[str]] = {
    "ground": set(),
    "wire": {"ground"},
    "protocol": {"ground", "wire"},
    "protocol.prefill": {"ground", "wire", "protocol"},
    "protocol.decode": {"ground", "wire", "protocol"},
    "config": {"ground", "wire", "protocol.decode"},
    "bus": {"ground", "wire", "protocol"},
    "trace": {"ground", "config", "wire", "protocol", "bus"},
    "engine": {"ground", "wire", *PROTOCOL, "bus", "trace"},
    "connector": {*BELOW_ENGINE, "engine"},
    "router.base": {"ground", "wire", "protocol", "trace", "router.http"},
    "router.http": {"ground", "config", "wire"},
    "router.fleet": {"ground", "wire", "protocol", "bus", "router.http"},
    "router.request": {"ground", "wire", "bus", "trace", "router.base", "router.http", "router.fleet"},
    "router": {*BELOW_ENGINE, "engine", "router.base", *ROUTER},
    "local": {*BELOW_ENGINE, "router.request"},
    "sim": {*BELOW_ENGINE, "engine", "local"},
    "tools": {*BELOW_ENGINE, "local"},
    "cli": {*BELOW_ENGINE, *ROUTER, "router.base", "local", "sim", "tools"},
}
# Rooms whose modules other rooms import from the room's face only. The others are used by the command line alone.
FACES = {"wire", *PROTOCOL, "bus", "trace", "engine", "local", "router.http", "router.fleet", "router.request"}
PURE = {"wire", *PROTOCOL}
PURE_MODULES = {
    *(f"kvbus.{name}" for name in ("bounded", "config", "errors")),
    *(f"kvbus.trace.{name}" for name in ("clocks", "history", "otlp_json", "path", "spans", "stages")),
    *(f"kvbus.tools.{name}" for name in ("lines", "pending", "traffic")),
}
NOT_PURE = {"asyncio", "threading", "time", "random", "os", "logging", "socket", "queue"}
# Each library and the only places that may import it.
ADAPTERS = {
    f"kvbus_connector.{name}"
    for name in ("connector", "first_token_processor", "nixl_plane", "prometheus", "vllm_nixl")
}
SITES = {
    "nats": {"kvbus.bus.nats_connection"},
    "opentelemetry": {"kvbus.trace.otlp"},
    "matplotlib": {"kvbus.tools.plots"},
    "msgpack": {"kvbus.wire.codec", "kvbus.sim.forge"},
    "cryptography": {"kvbus.bus.keys"},
    "prometheus_client": {"kvbus.router.metrics", "kvbus_connector.prometheus"},
    "vllm": {"kvbus_connector.plugin", *ADAPTERS},
    "nixl": set(),
    "torch": {"kvbus.local.model", "kvbus_connector.vllm_nixl"},
}


def room_of(module: str) -> str:
    package, *parts = module.split(".")
    if package == "kvbus_connector":
        return "connector"
    if not parts or parts[0] in GROUND:
        return "ground"
    if parts[0] == "__main__":  # python -m kvbus
        return "cli"
    if parts in (["router", "metrics"], ["router", "settings"]):
        return "router.base"
    inner = ".".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0]


def imports_of(module: str) -> Iterator[tuple[str, str]]:
    """What a module imports: whence it takes it, and the module that this is, ours or a library's."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            source = str(node.module)
            inner = {f"{source}.{alias.name}" for alias in node.names}
            yield from ((source, name) for name in inner & MODULES.keys() or {source})


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_its_row_says(room: str) -> None:
    for module in MODULES:
        if room_of(module) == room:
            others = {name: room_of(name) for _, name in imports_of(module) if name in MODULES}
            wrong = {name for name, other in others.items() if other != room and other not in MAY_IMPORT[room]}
            assert not wrong, f"{module}, in {room}, imports {wrong}"


@pytest.mark.parametrize("room", sorted(FACES))
def test_other_rooms_come_through_the_front_door(room: str) -> None:
    for module in MODULES:
        inside = {source for source, _ in imports_of(module) if source in MODULES and room_of(source) == room}
        assert room_of(module) == room or inside <= {f"kvbus.{room}"}, f"{module} reaches into {inside}"


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)


def test_nothing_runs_back_up() -> None:
    """Every room imports rooms of rows above its own only, so there is no circle."""
    seen: set[str] = set()
    rows = dict(MAY_IMPORT)
    while rows:
        ready = {room for room, others in rows.items() if others - {room} <= seen}
        assert ready, f"a circle among {sorted(rows)}"
        seen |= ready
        rows = {room: others for room, others in rows.items() if room not in ready}


def test_every_face_says_what_lives_there_and_exports_what_it_lists() -> None:
    for room in MAY_IMPORT:
        if (ROOT / "kvbus" / room.replace(".", "/")).is_dir():
            tree = ast.parse(MODULES[f"kvbus.{room}"].read_text())
            assert len((ast.get_docstring(tree) or "").splitlines()) >= 3, room


def test_what_a_face_exports_is_used() -> None:
    """By another room: what only its own room or a test uses is imported from its module."""
    used: set[tuple[str, str]] = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and room_of(node.module) != room_of(module):
                used |= {(node.module, alias.name) for alias in node.names}
    for room in FACES:
        tree = ast.parse(MODULES[f"kvbus.{room}"].read_text())
        [listed] = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        idle = [name for name in ast.literal_eval(listed) if (f"kvbus.{room}", name) not in used]
        assert not idle, f"kvbus.{room} exports what no other room uses: {idle}"


def test_pure_modules_import_nothing_impure() -> None:
    for module in MODULES:
        if room_of(module) in PURE or module in PURE_MODULES:
            impure = {name.partition(".")[0] for _, name in imports_of(module)} & NOT_PURE
            assert not impure, f"{module} imports {impure}"


@pytest.mark.parametrize("library", SITES)
def test_one_import_site_per_library(library: str) -> None:
    sites = {module for module in MODULES for _, name in imports_of(module) if name.partition(".")[0] == library}
    assert sites <= SITES[library]


def test_nothing_needs_vllm_nixl_or_torch_but_what_adapts_them() -> None:
    names = sorted(name for name in MODULES if name not in ADAPTERS and not name.endswith("__main__"))
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
