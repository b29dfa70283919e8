"""What an import costs, in CPU time: vLLM loads the plugin into every process of every engine, also without kvbus."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"


@pytest.mark.parametrize(
    ("module", "bound_s"), [("kvbus", 0.05), ("kvbus.cli", 0.6), ("kvbus_connector.plugin", 0.4)], ids=str
)
def test_an_import_is_quick(module: str, bound_s: float) -> None:
    """Measured: 1, 145 and 142 ms on a busy machine; the best of three, since the first one may write byte code."""
    took_s = min(_import_s(module) for _ in range(3))
    print(f"{module}: {1e3 * took_s:.0f} ms")
    assert took_s < bound_s


def _import_s(module: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(module)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def test_the_plugin_loads_no_library_that_vllm_would_not() -> None:
    program = "import sys, kvbus_connector.plugin; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"nats", "aiohttp", "opentelemetry", "typer", "torch", "nixl"} & set(done.stdout.split())
