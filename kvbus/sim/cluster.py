"""The engines of one run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from kvbus.sim.engine import Engine
from kvbus.sim.fake_decode import FakeDecode
from kvbus.wire import Heartbeat, Role, State


class Cluster:
    """Engines by name. An engine that was killed stays here until its next incarnation replaces it.

    Args:
        make_engine: makes an engine and starts it.
    """

    def __init__(self, make_engine: Callable[[Heartbeat], Engine], rng: random.Random) -> None:
        self._make_engine = make_engine
        ranks = rng.choice((1, 1, 2))
        self.prefills = [f"P{number}" for number in range(rng.randint(1, 3))]
        self.decodes = [f"D{number}" for number in range(rng.randint(1, 3))]
        roles = {**dict.fromkeys(self.prefills, Role.PREFILL), **dict.fromkeys(self.decodes, Role.DECODE)}
        self.engines = {
            name: make_engine(Heartbeat(name, 1, 0, role, State.READY, ranks, "m", history=True))
            for name, role in roles.items()
        }

    def route(self, chosen: str, others: list[str]) -> str:
        """The engine chosen, or another one if it is dead, as routers soon know."""
        return next((name for name in (chosen, *others) if self.engines[name].alive), chosen)

    def decode(self, name: str) -> FakeDecode:
        vllm = self.engines[name].vllm
        assert isinstance(vllm, FakeDecode)
        return vllm

    def restart(self, dead: Engine) -> None:
        own = dead.own
        self.engines[own.engine] = self._make_engine(replace(own, incarnation=own.incarnation + 1))

    def leftovers(self) -> dict[str, dict[str, int]]:
        """The tables that are not empty, by engine."""
        tables = {name: engine.leftovers() for name, engine in self.engines.items()}
        return {name: left for name, sizes in tables.items() if (left := {k: v for k, v in sizes.items() if v})}
