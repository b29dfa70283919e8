"""What a test tells the engines that run :mod:`support.hurt_connector`, and what they say that they did.

Files in a folder, since the engines are other processes: no vLLM is imported here.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "KVBUS_TEST_HURT"
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Orders:
    """What to hold back.

    Attributes:
        hold_write_s: from the matcher's decision to the real post, seconds; the WRITE counts as posted meanwhile.
        hold_handshake: prefill ranks get no metadata of a decode engine.
        stall: this engine's scheduler stops between two steps, EngineCore's thread with it; the others run on.
    """

    hold_write_s: float = 0.0
    hold_handshake: bool = False
    stall: str = ""


@dataclass(frozen=True)
class Note:
    """``what`` happened, to which transfer or engine; ``at`` is wall-clock seconds."""

    what: str
    about: str
    at: float


class Hurt:
    """Both ends of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._orders, self._notes = folder, folder / "orders.json", folder / "notes.jsonl"

    @classmethod
    def from_environment(cls) -> Hurt:
        return cls(Path(os.environ[FOLDER]))

    @property
    def environment(self) -> dict[str, str]:
        """Of an engine, so that it finds the folder, and the connector's module."""
        path = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        return {FOLDER: str(self._folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}

    def order(self, orders: Orders) -> None:
        fresh = self._orders.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(orders)))
        fresh.replace(self._orders)

    @property
    def orders(self) -> Orders:
        return Orders(**json.loads(self._orders.read_text()))

    def note(self, what: str, about: str) -> None:
        with self._notes.open("a") as notes:
            notes.write(json.dumps([what, about, time.time()]) + "\n")

    def notes(self, what: str, about: str = "") -> list[Note]:
        """Notes of one kind, of all transfers and engines unless one is named."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        notes = [Note(*json.loads(line)) for line in lines]
        return [note for note in notes if note.what == what and about in ("", note.about)]
