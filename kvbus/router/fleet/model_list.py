"""The models of all engines as one list. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvbus.router.fleet.model_names import read_list
from kvbus.router.http import NOT_FOUND, Answer, error


def merge_models(answers: Sequence[Answer]) -> Answer:
    """One answer of ``/v1/models`` from those of several engines; one that says it all stays as it is."""
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
