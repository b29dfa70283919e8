"""The names under which each engine serves its model, and its LoRA adapters. Pure.

The one rule: a name is good for the engine that says so, and for no other. The model in its heartbeat is always good;
what its ``/v1/models`` said is good until that says something else, a request finds no such model, or it leaves.

Heartbeats hold one name only: vLLM tells its scheduler neither the others nor the adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from kvbus.router.fleet.policy import Key, key_of
from kvbus.wire import Heartbeat

MAX_NAMES = 1024
MAX_NAME_CHARS = 256


class Names:
    """The table, bounded by the engines that there are and by :data:`MAX_NAMES` of each."""

    def __init__(self) -> None:
        self._learned: dict[Key, frozenset[str]] = {}

    def learn(self, engine: Heartbeat, names: Iterable[str]) -> None:
        """These, and no others, are what its ``/v1/models`` lists."""
        self._learned[key_of(engine)] = frozenset([*names][:MAX_NAMES])

    def forget_name(self, engine: Heartbeat, name: str) -> None:
        """It says that there is no such model."""
        if (learned := self._learned.get(key_of(engine))) is not None:
            self._learned[key_of(engine)] = learned - {name}

    def forget(self, engine: str, incarnation: int) -> None:
        """It has left."""
        self._learned.pop((engine, incarnation), None)

    def of(self, engine: Heartbeat) -> frozenset[str]:
        return self._learned.get(key_of(engine), frozenset()) | {engine.model}

    def serving(self, engines: Sequence[Heartbeat], name: str | None) -> list[Heartbeat]:
        """Those of ``engines`` that serve ``name``; None: all."""
        return [engine for engine in engines if name is None or self._serves(engine, name)]

    def _serves(self, engine: Heartbeat, name: str) -> bool:
        return name == engine.model or name in self._learned.get(key_of(engine), ())


def read_list(body: bytes) -> list[dict[str, object]] | None:
    """The cards in an answer of ``/v1/models``; None if it is none."""
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError):
        return None
    cards = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(cards, list):
        return None
    return [card for card in cards[:MAX_NAMES] if isinstance(card, dict) and _is_name(card.get("id"))]


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
