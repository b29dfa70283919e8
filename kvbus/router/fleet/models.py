"""The names under which each engine serves its model and its LoRA adapters, and the lists of ``/v1/models``. Pure.

The one rule: a name is good only for the engine that listed it. The model in its heartbeat is always good. What its
``/v1/models`` said is good until that says something else, a request finds no such model, or the engine leaves.

Heartbeats hold one name only: vLLM tells its scheduler neither the others nor the adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from kvbus.router.fleet.policy import Key, key_of
from kvbus.router.http import NOT_FOUND, Answer, error
from kvbus.wire import Heartbeat

MAX_NAMES = 1024
MAX_NAME_CHARS = 256


class ModelNames:
    """The table, bounded by the number of engines and by :data:`MAX_NAMES` of each."""

    def __init__(self) -> None:
        self._learned: dict[Key, frozenset[str]] = {}
        self._adapters: dict[Key, frozenset[str]] = {}

    def learn(self, engine: Heartbeat, names: Iterable[str], adapters: Iterable[str] = ()) -> None:
        """These, and no others, are what its ``/v1/models`` lists; ``adapters`` are those of LoRA adapters."""
        self._learned[key_of(engine)] = frozenset([*names][:MAX_NAMES])
        self._adapters[key_of(engine)] = frozenset(adapters) & self._learned[key_of(engine)]

    def is_adapter(self, name: str) -> bool:
        """Whether some engine serves a LoRA adapter by this name."""
        return any(name in adapters for adapters in self._adapters.values())

    def forget_name(self, engine: Heartbeat, name: str) -> None:
        """The engine says that it has no such model."""
        if (learned := self._learned.get(key_of(engine))) is not None:
            self._learned[key_of(engine)] = learned - {name}

    def forget(self, engine: str, incarnation: int) -> None:
        """The engine has left."""
        self._learned.pop((engine, incarnation), None)
        self._adapters.pop((engine, incarnation), None)

    def of(self, engine: Heartbeat) -> frozenset[str]:
        return self._learned.get(key_of(engine), frozenset()) | {engine.model}

    def serving(self, engines: Sequence[Heartbeat], name: str | None) -> list[Heartbeat]:
        """Those of ``engines`` that serve ``name``; None: all."""
        return [
            engine
            for engine in engines
            if name is None or name == engine.model or name in self._learned.get(key_of(engine), ())
        ]


def read_list(body: bytes) -> list[dict[str, object]] | None:
    """The models' cards in an answer of ``/v1/models``; None if it is no such answer."""
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError):
        return None
    cards = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(cards, list):
        return None
    return [card for card in cards[:MAX_NAMES] if isinstance(card, dict) and _is_name(card.get("id"))]


def merge_lists(answers: Sequence[Answer]) -> Answer:
    """One answer of ``/v1/models`` from those of several engines. One that lists every model is taken as it is."""
    cards: dict[object, dict[str, object]] = {}
    for answer in answers:
        for card in read_list(answer.body) or ():
            cards.setdefault(card["id"], card)
    for answer in answers:
        if {card["id"] for card in read_list(answer.body) or ()} == cards.keys():
            return answer
    return _json({"object": "list", "data": list(cards.values())})


def one_model(listing: Answer, name: str) -> Answer:
    """The answer of ``/v1/models/NAME``."""
    cards = read_list(listing.body) or []
    for card in cards:
        if card["id"] == name:
            return _json(card)
    served = ", ".join(str(card["id"]) for card in cards[:20])
    return error(404, f"the model {name!r:.200} does not exist; served: {served}", NOT_FOUND, "model")


def _json(content: object) -> Answer:
    return Answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
