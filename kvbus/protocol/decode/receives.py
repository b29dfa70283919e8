"""What one decode engine has registered and not given back: each receive's state, and the table of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kvbus.bounded import Deadlines
from kvbus.protocol.decode.patience import NEVER_SEEN
from kvbus.wire import Registration

FIRST_RESEND_S = 0.25
MAX_RESEND_S = 2.0
# Nothing but the answer to it brings back word of a failure that was lost while the prefill engine lives on.
HELD_RESEND_S = 5.0


class Phase(Enum):
    """Of a receive, from its registration until vLLM has the blocks back."""

    REGISTERED = "registered"  # sent, and sent again until every rank has acknowledged
    HELD = "held"  # by every rank of one prefill engine; sent again, rarely
    CANCELLING = "cancelling"  # the blocks wait for the ranks that may still write to say that they will not
    FENCING = "fencing"  # nobody answers: the blocks wait until every write lease has run out


class Step(Enum):
    """What moves a receive from one phase to another."""

    ACKNOWLEDGE = "every rank of the prefill engine has acknowledged"
    CANCEL = "it is given up, and who may write is asked not to"
    FENCE = "nobody answers: its write leases have to run out"


NEXT = {
    (Phase.REGISTERED, Step.ACKNOWLEDGE): Phase.HELD,
    (Phase.REGISTERED, Step.CANCEL): Phase.CANCELLING,
    (Phase.REGISTERED, Step.FENCE): Phase.FENCING,
    (Phase.HELD, Step.CANCEL): Phase.CANCELLING,
    (Phase.HELD, Step.FENCE): Phase.FENCING,
    (Phase.CANCELLING, Step.FENCE): Phase.FENCING,
    (Phase.FENCING, Step.FENCE): Phase.FENCING,
}
"""Every step that there is: what is given up stays so. Which event leads to which one: ``docs/protocol.md``."""


@dataclass(slots=True)
class Receive:
    """One registration. Times are seconds.

    Attributes:
        engine: the prefill engine that it is sent to; empty for the pool.
        sent_to: the incarnation of it that was last given the right to write.
        acknowledged, ended: its ranks that have acknowledged, and that will not write any more.
        claimed: the prefill engine has the request.
        release: by the cancel: the prefill engine may free its blocks.
    """

    registration: Registration
    engine: str
    registered_at: float
    patience_until: float
    give_up_at: float
    phase: Phase = Phase.REGISTERED
    incarnation: int = 0
    sent_to: int = 0
    ranks: int = 0
    acknowledged: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    claimed: bool = False
    resend_s: float = FIRST_RESEND_S
    resend_at: float = 0.0
    reason: str = ""
    release: bool = True

    @property
    def request_id(self) -> str:
        return self.registration.request_id

    @property
    def is_given_up(self) -> bool:
        return self.phase in (Phase.CANCELLING, Phase.FENCING)

    @property
    def is_answered(self) -> bool:
        """Whether no rank can write any more, since each has said so."""
        return self.ranks > 0 and len(self.ended) == self.ranks

    def take(self, step: Step) -> None:
        """Go to the phase that follows: the only way that it changes."""
        self.phase = NEXT[self.phase, step]

    def resend_later(self, now: float) -> None:
        """It was sent now: set when it is sent again."""
        if self.phase is Phase.HELD:
            # Word that its request was seen may be lost, and the time for it is short.
            self.resend_at = now + (HELD_RESEND_S if self.claimed else MAX_RESEND_S)
        else:
            self.resend_at = now + self.resend_s
            self.resend_s = min(2 * self.resend_s, MAX_RESEND_S)

    def why_late(self) -> str:
        """What it has waited for in vain."""
        if not self.engine:
            return NEVER_SEEN
        if not self.acknowledged:
            return "no prefill engine acknowledged the registration"
        if not self.claimed:
            return "the prefill engine never saw the request"
        return "no sign of life from the prefill engine"


class Receives:
    """The table of receives: by request, by transfer, by prefill engine; and when each is looked at again."""

    def __init__(self) -> None:
        self._by_request: dict[str, Receive] = {}
        self._by_transfer: dict[str, Receive] = {}
        self._by_engine: dict[str, dict[str, Receive]] = {}
        self._timers: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._by_request)

    def counts(self) -> dict[str, int]:
        """Receives by the value of their phase."""
        phases = Counter(receive.phase for receive in self._by_request.values())
        return {phase.value: phases[phase] for phase in Phase}

    def all(self) -> list[Receive]:
        return list(self._by_request.values())

    def get(self, request_id: str) -> Receive | None:
        return self._by_request.get(request_id)

    def of_transfer(self, transfer_id: str) -> Receive | None:
        return self._by_transfer.get(transfer_id)

    def of_engine(self, engine: str) -> list[Receive]:
        """What a heartbeat or a pulse of this prefill engine is about; of the pool if it is empty."""
        return list(self._by_engine.get(engine, {}).values())

    def add(self, receive: Receive) -> bool:
        """False if its request or its transfer has one already."""
        if receive.request_id in self._by_request or receive.registration.transfer_id in self._by_transfer:
            return False
        self._by_request[receive.request_id] = receive
        self._by_transfer[receive.registration.transfer_id] = receive
        self._by_engine.setdefault(receive.engine, {})[receive.request_id] = receive
        return True

    def bind(self, receive: Receive, engine: str) -> None:
        """This prefill engine has answered for it."""
        if engine != receive.engine:
            self._leave(receive)
            receive.engine = engine
            self._by_engine.setdefault(engine, {})[receive.request_id] = receive

    def remove(self, request_id: str) -> Receive | None:
        receive = self._by_request.pop(request_id, None)
        if receive is not None:
            del self._by_transfer[receive.registration.transfer_id]
            self._leave(receive)
            self._timers.drop(request_id)
        return receive

    def wait(self, receive: Receive, until: float | None = None) -> None:
        """Look at it again then; by default when it has waited for long enough, or is to be sent again."""
        at = min(receive.patience_until, receive.give_up_at, receive.resend_at) if until is None else until
        self._timers.set(receive.request_id, at)

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def due(self, now: float) -> Iterable[Receive]:
        """What is to be looked at now."""
        return [self._by_request[request_id] for request_id in self._timers.pop_due(now)]

    def _leave(self, receive: Receive) -> None:
        others = self._by_engine[receive.engine]
        del others[receive.request_id]
        if not others:
            del self._by_engine[receive.engine]
