"""Whether the router can answer requests, and what is missing for fast answers. Pure.

The one rule: what only makes answers slow does not make the router unready. Else one lost engine becomes an outage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbus.router.fleet.policy import fit, is_usable
from kvbus.wire import Heartbeat

ALONE = "decode engines compute prompts themselves"


@dataclass(frozen=True, slots=True)
class Readiness:
    """``lacking``: what is missing, worst first. ``models``: the ready engines of each, by role."""

    ready: bool
    has_pair: bool
    draining: bool
    bus_away_s: float | None
    lacking: tuple[str, ...]
    models: dict[str, dict[str, list[str]]]

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        if not self.ready:
            return "not ready"
        return "degraded" if self.lacking else "ok"

    def as_json(self) -> dict[str, object]:
        def names(kind: str) -> list[str]:
            return sorted({engine for kinds in self.models.values() for engine in kinds[kind]})

        return {
            "status": self.status,
            "lacking": list(self.lacking),
            "pair": self.has_pair,
            "bus_connected": self.bus_away_s is None,
            "bus_away_s": None if self.bus_away_s is None else round(self.bus_away_s, 1),
            "prefill_engines": names("prefill"),
            "decode_engines": names("decode"),
            "models": self.models,
        }


def readiness_of(engines: Sequence[Heartbeat], *, bus_away_s: float | None = None, draining: bool = False) -> Readiness:
    """What :class:`Readiness` says of these engines.

    Args:
        engines: those that are trusted; with the bus away, those of them that were there when it went.
        bus_away_s: None if the bus is connected.
    """
    lacking = ["the router was told to stop"] if draining else []
    models: dict[str, dict[str, list[str]]] = {}
    has_pair = serves = False
    by_model: dict[str, list[Heartbeat]] = {}
    for engine in engines:
        by_model.setdefault(engine.model, []).append(engine)
    for model, its in sorted(by_model.items()):
        usable = [engine for engine in its if is_usable(engine)]
        prefill = [engine for engine in usable if engine.role.prefills]
        decode = [engine for engine in usable if engine.role.decodes]
        models[model] = {"prefill": [each.engine for each in prefill], "decode": [each.engine for each in decode]}
        pair = any(fit(source, sink) for source in _kinds(prefill) for sink in _kinds(decode))
        has_pair, serves = has_pair or pair, serves or bool(decode)
        if not decode:
            lacking.append(f"{model}: no decode engine is ready")
        elif not prefill:
            lacking.append(f"{model}: no prefill engine is ready: {ALONE}")
        elif not pair:
            lacking.append(f"{model}: no prefill engine fits a decode engine: {ALONE}")
    if bus_away_s is not None:
        lacking.append(f"the bus is away for {bus_away_s:.0f} s: engines are those that were there")
    if not models:
        lacking.append("no engine is known")
    return Readiness(serves and not draining, has_pair, draining, bus_away_s, tuple(lacking), models)


def _kinds(engines: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Two engines of each ``compat``: they stand for the others, and one alone must not be paired with itself."""
    kinds: dict[frozenset[tuple[str, str]], list[Heartbeat]] = {}
    for engine in engines:
        if len(same := kinds.setdefault(frozenset(engine.compat), [])) < 2:
            same.append(engine)
    return [engine for same in kinds.values() for engine in same]
