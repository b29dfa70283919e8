"""Whether the router can answer requests, and what is missing for fast answers. Pure.

The one rule: what only makes answers slow does not make the router unready. Else one lost engine becomes an outage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

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
    by_model: dict[str, list[Heartbeat]] = {}
    for engine in engines:
        by_model.setdefault(engine.model, []).append(engine)
    models = [_Usable.of(model, by_model[model]) for model in sorted(by_model)]
    lacking = ["the router was told to stop"] if draining else []
    lacking += [f"{model.name}: {model.lacking}" for model in models if model.lacking]
    if bus_away_s is not None:
        lacking.append(f"the bus is away for {bus_away_s:.0f} s: engines are those that were there")
    if not models:
        lacking.append("no engine is known")
    return Readiness(
        ready=any(model.decode for model in models) and not draining,
        has_pair=any(model.has_pair for model in models),
        draining=draining,
        bus_away_s=bus_away_s,
        lacking=tuple(lacking),
        models={model.name: model.names for model in models},
    )


@dataclass(frozen=True, slots=True)
class _Usable:
    """The engines of one model that can be used now."""

    name: str
    prefill: list[Heartbeat]
    decode: list[Heartbeat]

    @classmethod
    def of(cls, name: str, engines: Iterable[Heartbeat]) -> Self:
        usable = [engine for engine in engines if is_usable(engine)]
        prefill = [engine for engine in usable if engine.role.prefills]
        return cls(name, prefill, [engine for engine in usable if engine.role.decodes])

    @property
    def names(self) -> dict[str, list[str]]:
        return {"prefill": [each.engine for each in self.prefill], "decode": [each.engine for each in self.decode]}

    @property
    def has_pair(self) -> bool:
        return any(fit(source, sink) for source in _kinds(self.prefill) for sink in _kinds(self.decode))

    @property
    def lacking(self) -> str:
        """What keeps this model from disaggregated serving; empty if nothing does."""
        if not self.decode:
            return "no decode engine is ready"
        if not self.prefill:
            return f"no prefill engine is ready: {ALONE}"
        return "" if self.has_pair else f"no prefill engine fits a decode engine: {ALONE}"


def _kinds(engines: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Two engines of each ``compat``: they stand for the others, and one alone must not be paired with itself."""
    kinds: dict[frozenset[tuple[str, str]], list[Heartbeat]] = {}
    for engine in engines:
        if len(same := kinds.setdefault(frozenset(engine.compat), [])) < 2:
            same.append(engine)
    return [engine for same in kinds.values() for engine in same]
