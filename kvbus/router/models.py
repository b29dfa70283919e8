"""The models of all engines as one list. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvbus.router.answers import Answer


def merge_models(answers: Sequence[Answer]) -> Answer:
    """One answer of ``/v1/models`` from those of one engine for each model; of a single one, that one."""
    if len(answers) == 1:
        return answers[0]
    data = [model for answer in answers for model in json.loads(answer.body).get("data", [])]
    listing = {"object": "list", "data": data}
    return Answer(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
