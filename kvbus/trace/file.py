"""The last traces in a file: OTLP JSON, a request's spans a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvbus.trace.otlp_json import to_otlp
from kvbus.trace.spans import SpanData

MAX_BYTES = 32 << 20


class TraceFile:
    """Appends to ``path``. What is older than ``max_bytes`` moves to ``path`` + ``.1``, of which there is one.

    Used by one thread.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # the last line may have been cut off

    def write(self, spans: Sequence[SpanData]) -> None:
        if self._file.tell() > self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(to_otlp(spans), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
