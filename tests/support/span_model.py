"""Whether spans are what ``traces/model.json`` says that spans are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvbus.trace import SpanData
from kvbus.trace.spans import INTERNAL, PRODUCER, SERVER

MODEL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "traces" / "model.json").read_text())
_KINDS = {"INTERNAL": INTERNAL, "PRODUCER": PRODUCER, "SERVER": SERVER}
_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
OF_RANK = re.compile(r"(.+) rank \d+")


def differences(spans: Iterable[SpanData]) -> list[str]:
    """What differs from the model, a line for each."""
    found: list[str] = []
    by_id = {span.span_id: span for span in spans}
    for span in by_id.values():
        rank = OF_RANK.fullmatch(span.name)
        name = "STAGE rank N" if rank else span.name
        model = MODEL["spans"].get(name)
        if model is None:
            found.append(f"{span.name}: not in the model")
            continue
        if span.kind != _KINDS[model["kind"]]:
            found.append(f"{span.name}: kind {span.kind}")
        if model["service"].startswith("kvbus-") and span.service != model["service"]:
            found.append(f"{span.name}: service {span.service}")
        parent = by_id.get(span.parent_id)
        wanted = model["parent"]
        if wanted == "request" and (parent is None or parent.name != "request"):
            found.append(f"{span.name}: its parent is {parent.name if parent else 'missing'}")
        if wanted == "a stage" and (parent is None or MODEL["spans"][parent.name]["parent"] != "request"):
            found.append(f"{span.name}: its parent is {parent.name if parent else 'missing'}")
        allowed = {**MODEL["any_span"], **model["attributes"]}
        for key, value in span.attributes.items():
            kind = allowed.get(key)
            if kind is None:
                found.append(f"{span.name}: attribute {key} is not in the model")
            elif not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool)):
                found.append(f"{span.name}: {key}={value!r} is no {kind}")
    return found
