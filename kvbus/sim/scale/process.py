"""What the processes of a run share: how each starts, and the JSON files by which they tell the first one."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

MODEL = "simulated"
SENT_HEADER = "X-Sent-At"


def run_process(main: Coroutine[Any, Any, None]) -> None:
    """Run until it ends, or Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main)


def write_json(path: Path, content: object) -> None:
    """Write a file that no reader sees half written."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Empty while there is no such file."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content
