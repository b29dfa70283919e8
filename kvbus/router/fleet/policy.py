"""Which engines a request goes to. Pure: chance is an argument.

The power of two choices: the less loaded of two engines picked at random, so that several routers with the same old
heartbeats do not all pick the same one. But if the engine that has probably kept the prompt's prefix is little busier,
it is that one. Where engines tell what they have of the prompt, those that have most of it are candidates, too, and
what each would have to compute or to fetch is part of its load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from kvbus.protocol import differences
from kvbus.router.fleet.loads import Loads
from kvbus.wire import Heartbeat, State

DECODE_SLACK = 4.0  # requests; what a prefix kept on decode saves, the transfer of it, is little
RICHEST = 3  # engines that are candidates since they have most of the prompt

Key = tuple[str, int]
"""An engine and its incarnation."""


def key_of(engine: Heartbeat) -> Key:
    return (engine.engine, engine.incarnation)


def is_usable(engine: Heartbeat) -> bool:
    """Whether it takes new requests."""
    return engine.state is State.READY and bool(engine.address)


def one_per_port(engines: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Data parallel ranks share a port: one engine of each."""
    ports = {(engine.address, engine.role): engine for engine in engines}
    return sorted(ports.values(), key=key_of)


def fit(prefill: Heartbeat, decode: Heartbeat) -> bool:
    """Whether KV can go from one to the other."""
    return prefill.engine != decode.engine and not differences(prefill, decode)


def rank(session: str, engines: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Rendezvous hashing: an order of the engines for this session. An engine that joins or leaves changes only its own
    place in it."""

    def weight(engine: Heartbeat) -> bytes:
        return hashlib.blake2b(f"{session}\0{engine.engine}".encode(), digest_size=8).digest()

    return sorted(engines, key=weight)


def choose_one(
    engines: Sequence[Heartbeat],
    load: Callable[[Heartbeat], float],
    chance: Random,
    *,
    session: str = "",
    slack: float = 0.0,
    saved: Callable[[Heartbeat], float] | None = None,
) -> Heartbeat | None:
    """One of ``engines``, None if there is none.

    Args:
        session: the request's affinity key, empty for none.
        slack: how much more loaded than the other choice the session's own engine may be.
        saved: how much more loaded an engine may be since it has some of the prompt; None if nobody is known to.
    """
    if not engines:
        return None
    two = chance.sample(list(engines), min(2, len(engines)))
    if saved is not None:
        home = rank(session, engines)[0] if session else None
        richest = sorted(engines, key=saved, reverse=True)[:RICHEST]
        candidates = [*([home] if home is not None else []), *richest, *two]  # of equal ones the first
        return min(candidates, key=lambda engine: load(engine) - saved(engine))
    lighter = min(two, key=load)
    if session:
        home = rank(session, engines)[0]
        if load(home) <= load(lighter) + slack:
            return home
    return lighter


@dataclass(frozen=True, slots=True)
class Choice:
    """The engines that one request can go to now.

    Args:
        engines: those that serve the requested model.
        tokens: about how many the prompt has. A prefix cache saves at most so much work, so the session's own engine
            may have so much more to do than another.
        alone: the decode engine must compute the prompt itself.
        ranked: a leg reaches the data parallel rank that it names. Else data parallel engines take part in no transfer,
            since nobody knows which rank would get the leg.
        held: tokens of the prompt in the prefix caches of engines, by their names; empty if that is not known.
        most: a decode engine with so many requests of this router gets more only if there is no other.
    """

    engines: Sequence[Heartbeat]
    loads: Loads
    chance: Random
    session: str = ""
    tokens: int = 0
    alone: bool = False
    ranked: bool = True
    most: int = 1 << 30
    held: Mapping[str, int] = field(default_factory=dict)

    def source(self, sink: Heartbeat | None, without: Collection[Key] = ()) -> Heartbeat | None:
        """A prefill engine for ``sink``; if that is None, one for which there is a decode engine."""
        if self.alone:
            return None
        sinks = self._sinks(without) if sink is None else [sink]
        fitting = [
            engine
            for engine in self.engines
            if engine.role.prefills
            and self._is_eligible(engine, without)
            and any(self._fit(engine, each) for each in sinks if key_of(each) != key_of(engine))
        ]
        return choose_one(
            self.loads.preferred(fitting),
            self.loads.prefill,
            self.chance,
            session=self.session,
            slack=float(self.tokens),
            saved=self._tokens_held if self._tells(fitting) else None,
        )

    def sink(self, source: Heartbeat | None, without: Collection[Key] = ()) -> Heartbeat | None:
        """A decode engine that takes KV from ``source``; if that is None, any."""
        fitting = [engine for engine in self._sinks(without) if source is None or self._fit(source, engine)]
        roomy = [engine for engine in fitting if self.loads.own(engine) < self.most] or fitting
        return choose_one(
            self.loads.preferred(roomy),
            self.loads.decode,
            self.chance,
            session=self.session,
            slack=DECODE_SLACK,
            saved=self._transfer_saved if self._tells(roomy) else None,
        )

    def _tells(self, engines: Sequence[Heartbeat]) -> bool:
        """Whether any of them is known to have some of the prompt."""
        return any(engine.engine in self.held for engine in engines)

    def _tokens_held(self, engine: Heartbeat) -> float:
        return float(self.held.get(engine.engine, 0))

    def _transfer_saved(self, engine: Heartbeat) -> float:
        return DECODE_SLACK * min(1.0, self._tokens_held(engine) / max(self.tokens, 1))

    def _sinks(self, without: Collection[Key]) -> list[Heartbeat]:
        return [engine for engine in self.engines if engine.role.decodes and self._is_eligible(engine, without)]

    def _is_eligible(self, engine: Heartbeat, without: Collection[Key]) -> bool:
        return is_usable(engine) and key_of(engine) not in without

    def _fit(self, prefill: Heartbeat, decode: Heartbeat) -> bool:
        return fit(prefill, decode) and (self.ranked or not (prefill.data_parallel or decode.data_parallel))
