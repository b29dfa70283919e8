"""Which engines a request goes to. Pure: a policy is a function of what is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbus.membership import differences
from kvbus.messages import Heartbeat, State


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Heartbeat
    decode: Heartbeat


def choose_decode(engines: Sequence[Heartbeat], model: str | None, outstanding: Mapping[str, int]) -> Heartbeat | None:
    """The decode engine with the fewest requests outstanding, to compute a prompt itself; None if there is none."""
    ready = [engine for engine in engines if engine.role.decodes and _usable(engine, model)]
    return min(ready, key=lambda engine: (outstanding.get(engine.engine, 0), engine.engine), default=None)


def _usable(engine: Heartbeat, model: str | None) -> bool:
    return engine.state is State.READY and bool(engine.address) and (model is None or engine.model == model)


def choose(engines: Sequence[Heartbeat], model: str | None, outstanding: Mapping[str, int]) -> Pair | None:
    """The compatible pair with the fewest requests of ours outstanding; None if there is none.

    Args:
        model: the served model's name that the client asks for, None for any.
        outstanding: requests that this router has sent to each engine and that are not over.
    """

    pairs = [
        Pair(prefill, decode)
        for prefill in engines
        if prefill.role.prefills and _usable(prefill, model)
        for decode in engines
        if decode.role.decodes and _usable(decode, model) and decode.engine != prefill.engine
        if not differences(prefill, decode)
    ]

    def load(pair: Pair) -> tuple[int, int, str, str]:
        prefill, decode = pair.prefill.engine, pair.decode.engine
        return (outstanding.get(prefill, 0), outstanding.get(decode, 0), prefill, decode)

    return min(pairs, key=load, default=None)
