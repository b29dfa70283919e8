"""History: what a decode engine has of a prompt's beginning and the prefill engine lacks, as a transfer turned round.

It stands for ``kvbus_connector.history`` (:class:`Taker`) and ``kvbus_connector.history_giver`` (:class:`Giver`), and
keeps their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbus.engine import OfPrefill
from kvbus.protocol.prefill import Released
from kvbus.sim.fake_vllm import TOKENS_PER_BLOCK, SinkPort
from kvbus.sim.faults import Violation
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus.wire import (
    FIRST_ATTEMPT,
    Cancel,
    Heartbeat,
    PrefillCompleted,
    PrefillFailed,
    Registration,
    Release,
    Wanted,
    blocks,
)

SUFFIX = "~history"
WITHDRAW_AGAIN_S = 0.2
AsSink = Callable[[Request, int, str], dict[str, Any]]
AsSource = Callable[[Request, str], dict[str, Any]]


@dataclass(slots=True)
class _Asked:
    request: Request
    source: str
    at: float
    blocks: int | None = None
    """How many the decode engine has; None while it has not said."""
    receiving: bool = False


class Taker:
    """Of a prefill engine: from the question until the history is here, or is known not to come.

    Args:
        as_sink: what each message of this engine about a request says first.
    """

    def __init__(self, world: World, own: Heartbeat, sink: SinkPort, as_sink: AsSink) -> None:
        self._runtime, self._timing, self._own = world.runtime, world.timing, own
        self._sink, self._as_sink = sink, as_sink
        self._asked: dict[str, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, request: Request) -> bool:
        """A prefill has come into the queue; returns whether an offer is waited for."""
        if not request.history or request.transfer_id in self._asked:
            return False
        if self._sink.why_not(request.sink):
            self._count("no source")
            return False
        self._asked[request.transfer_id] = _Asked(request, request.sink, self._runtime.now)
        self._sink.want(Wanted(**self._as_sink(request, FIRST_ATTEMPT, SUFFIX)), request.sink)
        return True

    def hear(self, message: OfPrefill) -> bool:
        """A decode engine says what it has; returns whether that was waited for."""
        asked = self._asked.get(message.transfer_id.removesuffix(SUFFIX))
        if asked is None or asked.receiving or asked.blocks is not None or not message.transfer_id.endswith(SUFFIX):
            return False
        asked.blocks = message.tokens // TOKENS_PER_BLOCK if isinstance(message, PrefillCompleted) else 0
        return True

    def waits(self, request: Request) -> bool:
        """Whether its prefill does not begin, since an offer may come still."""
        asked = self._asked.get(request.transfer_id)
        if asked is None:
            return False
        if asked.blocks is None and self._runtime.now >= asked.at + self._timing.offer_wait_s:
            self._decline(asked, "too late")
            return False
        return asked.blocks is None

    def offered(self, request: Request) -> int:
        """How many blocks of the prompt's beginning the decode engine has, if the prefill engine lacks any of them."""
        asked = self._asked.get(request.transfer_id)
        if asked is None or asked.blocks is None:
            return 0
        if asked.blocks <= request.source_cached_blocks:
            self._decline(asked, "nothing is missing")
            return 0
        return asked.blocks

    def register(self, request: Request, taken: Sequence[int], offered: int, digest: str) -> None:
        """These blocks are allocated for what is missing."""
        asked = self._asked[request.transfer_id]
        asked.receiving = True
        registration = Registration(
            **self._as_sink(request, FIRST_ATTEMPT, SUFFIX),
            blocks=blocks.to_runs([taken]),
            prompt_tokens=offered * TOKENS_PER_BLOCK,
            cached_tokens=(offered - len(taken)) * TOKENS_PER_BLOCK,
            digest=digest,
        )
        self._sink.register(registration, asked.source)

    def over(self, request: Request, request_id: str, *, ok: bool) -> None:
        """Every rank has reported it."""
        asked = self._asked.pop(request.transfer_id)
        self._check_wait(asked)
        self._count("received" if ok else "failed")
        if ok:
            self._sink.received(request_id)
            self._sink.first_token(request_id)

    def _decline(self, asked: _Asked, reason: str) -> None:
        del self._asked[asked.request.transfer_id]
        self._check_wait(asked)
        self._count(reason)
        cancel = Cancel(**self._as_sink(asked.request, FIRST_ATTEMPT, SUFFIX), reason=reason)
        self._sink.unwanted(cancel, asked.source)

    def _check_wait(self, asked: _Asked) -> None:
        waited_s = self._runtime.now - asked.at
        if waited_s > self._timing.max_history_s:
            raise Violation(f"{self._own.engine} waited {waited_s:.1f} s for history of {asked.request.transfer_id}")

    def _count(self, how: str) -> None:
        self._runtime.counts[f"history: {how}"] += 1


class Giver:
    """Of a decode engine: what it offers, and until when its blocks must stay.

    The one rule: vLLM hears of the end of such a request's own receive only after every rank has let its blocks go.

    Args:
        as_source: what each message of this engine about a request says first.
        tell: says it on the bus, and surely in the next step.
        tell_ranks: says something in the next step only.
    """

    def __init__(
        self,
        world: World,
        own: Heartbeat,
        as_source: AsSource,
        tell: Callable[[OfPrefill], None],
        tell_ranks: Callable[[Released], None],
    ) -> None:
        self._world, self._own, self._as_source = world, own, as_source
        self._tell, self._tell_ranks = tell, tell_ranks
        self._given: dict[str, Request] = {}
        self._again_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._given)

    def is_asked(self, request: Request) -> bool:
        """Whether something is said of its history when vLLM gives it blocks: once, for its first attempt."""
        return request.history and request.attempt == FIRST_ATTEMPT

    def offer(self, request: Request, request_id: str, kept: Sequence[int], digest: str) -> None:
        """vLLM has given the request its blocks, of which ``kept`` hold the prompt's beginning."""
        about = self._as_source(request, SUFFIX)
        if not kept:
            self._tell(PrefillFailed(**about, reason="nothing is cached"))
            return
        self._given[request_id] = request
        tokens = len(kept) * TOKENS_PER_BLOCK
        self._tell(PrefillCompleted(**about, blocks=blocks.to_runs([kept]), tokens=tokens, digest=digest))

    def holds_back(self, request_id: str) -> bool:
        """Whether vLLM must not hear yet that this request's own receive is over."""
        return request_id in self._given

    def let_go(self, request_id: str) -> None:
        """No rank reads its blocks any more."""
        del self._given[request_id]
        self._again_at.pop(request_id, None)

    def withdraw(self, request_id: str) -> None:
        """Its own receive is over: the ranks shall let the history go, unless they are writing it."""
        now, me = self._world.runtime.now, self._own
        if now < self._again_at.get(request_id, 0.0):
            return
        self._again_at[request_id] = now + WITHDRAW_AGAIN_S
        name = self._given[request_id].transfer_id + SUFFIX
        word = Release(name, FIRST_ATTEMPT, me.engine, me.engine, me.incarnation, "nobody waits for it")
        self._tell_ranks(Released(word))
