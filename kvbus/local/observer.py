"""A passive listener on the bus, in a thread of its own: which engines are there, which transfers have ended."""

from __future__ import annotations

import threading
import time
from collections import deque

from kvbus.bounded import BoundedDict
from kvbus.bus import NatsBus, Node
from kvbus.config import Config
from kvbus.protocol import Change, Membership, PeerChanged, PeerJoined, PeerLeft
from kvbus.wire import (
    Heartbeat,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Subjects,
    TransferDone,
    TransferFailed,
    TransferStarted,
)

MAX_KEPT = 4096


class Observer:
    """See the module's docstring. Public attributes may be read from any thread.

    ``prefilling``: how far the prefills are that have not ended.
    ``hand_offs``: seconds from the message of a prefill's completion to the message that its WRITE is posted.
    """

    def __init__(self, config: Config) -> None:
        self.engines: dict[str, Heartbeat] = {}
        self.transfers: BoundedDict[str, list[TransferDone]] = BoundedDict(MAX_KEPT)
        self.prefilling: BoundedDict[str, PrefillProgress] = BoundedDict(MAX_KEPT)
        self.hand_offs: deque[float] = deque(maxlen=MAX_KEPT)
        self._completed: BoundedDict[str, float] = BoundedDict(MAX_KEPT)
        self.failures: deque[TransferFailed] = deque(maxlen=MAX_KEPT)
        self._changed = threading.Condition()
        subjects = Subjects(config.namespace)
        membership = Membership(dead_after_s=config.dead_after_s)
        self._node = Node(
            NatsBus(config.servers, "kvbus-observer"), subjects, name="kvbus-observer", membership=membership
        )
        self._node.watch_peers(self._on_peer)
        self._node.listen(subjects.transfers("*"), (TransferStarted, TransferDone, TransferFailed), self._on_transfer)
        prefills = (PrefillProgress, PrefillCompleted, PrefillFailed)
        self._node.listen(subjects.prefill("*"), prefills, self._on_prefill)
        self._node.start()

    def close(self) -> None:
        self._node.close()

    def wait(self, timeout_s: float) -> None:
        """Return at the next change, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def transfer(self, transfer_id: str, timeout_s: float = 2.0) -> list[TransferDone]:
        """What each prefill rank said when its WRITEs had ended; empty if nothing comes in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.transfers.get(transfer_id, [])
            if (found and len(found) == found[0].ranks) or time.monotonic() > deadline:
                return list(found)
            self.wait(0.05)

    def _on_peer(self, change: Change) -> None:
        with self._changed:
            match change:
                case PeerJoined(heartbeat) | PeerChanged(heartbeat):
                    self.engines[heartbeat.engine] = heartbeat
                case PeerLeft(engine, _, _, _):
                    self.engines.pop(engine, None)
            self._changed.notify_all()

    def _on_prefill(self, message: PrefillProgress | PrefillCompleted | PrefillFailed) -> None:
        if isinstance(message, PrefillProgress):
            self.prefilling[message.transfer_id] = message
            return
        self.prefilling.pop(message.transfer_id, None)
        if isinstance(message, PrefillCompleted):
            self._completed[message.transfer_id] = time.monotonic()

    def _on_transfer(self, message: TransferStarted | TransferDone | TransferFailed) -> None:
        with self._changed:
            if isinstance(message, TransferFailed):
                self.failures.append(message)
            elif isinstance(message, TransferStarted):
                if (completed_at := self._completed.pop(message.transfer_id, None)) is not None:
                    self.hand_offs.append(time.monotonic() - completed_at)
            elif isinstance(message, TransferDone):
                self.transfers.setdefault(message.transfer_id, []).append(message)
            self._changed.notify_all()
