"""The matcher: joins registrations and completions in one rank of a prefill engine, in whichever order they come.

The one rule: a WRITE is posted for an effect :class:`PostWrite` and for nothing else, by the thread that applied the
event, before it applies another one; so what was checked here still holds when the WRITE is posted.

Pure: time is an argument (seconds, monotonic), whatever a peer can send is answered with an effect. Called by
:class:`kvbus.engine.rank.Rank` only. What each event does in each stage of a transfer: ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbus.protocol import WRITE_LEASE_S
from kvbus.protocol.prefill.answers import Answers
from kvbus.protocol.prefill.decode_peers import Sinks
from kvbus.protocol.prefill.events import (
    Drain,
    Effect,
    Event,
    PooledCancel,
    PooledRegistration,
    Reject,
    Released,
    SinkJoined,
    SinkLeft,
    SinkRefused,
    WriteEnded,
)
from kvbus.protocol.prefill.joiner import Joiner
from kvbus.protocol.prefill.prefills import Prefills
from kvbus.protocol.prefill.registrations import Registrations
from kvbus.protocol.prefill.table import MAX_TRANSFERS, Holds, Transfers
from kvbus.protocol.prefill.transfer import Outcome, Stage
from kvbus.wire import (
    Cancel,
    Delivered,
    LeaseEcho,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Registration,
    Wanted,
)


class Matcher:
    """The transfers of one rank; see the module's docstring.

    Args:
        engine, incarnation, rank, ranks: this rank's identity, put into every message.
        block_lease_s, pool_hold_s, registration_hold_s: see :class:`~kvbus.protocol.prefill.table.Holds`.
        write_lease_s, pulse_number: see :mod:`kvbus.protocol.lease`.
    """

    def __init__(
        self,
        *,
        engine: str,
        incarnation: int,
        rank: int,
        ranks: int,
        block_lease_s: float = 30.0,
        pool_hold_s: float = 10.0,
        registration_hold_s: float = 600.0,
        write_lease_s: float = WRITE_LEASE_S,
        pulse_number: Callable[[], int] | None = None,
        max_transfers: int = MAX_TRANSFERS,
    ) -> None:
        holds = Holds(block_lease_s, pool_hold_s, registration_hold_s)
        self._answers = answers = Answers(engine, incarnation, rank, ranks)
        self._transfers = transfers = Transfers(max_transfers)
        self._sinks = sinks = Sinks(engine, incarnation, rank, write_lease_s, pulse_number)
        self._joiner = joiner = Joiner(transfers, sinks, answers, holds)
        self._prefills = Prefills(transfers, joiner, answers, holds)
        self._registrations = Registrations(transfers, joiner, sinks, answers, holds)

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def counts(self) -> dict[str, int]:
        """Sizes for metrics and tests: transfers by what they wait for."""
        return self._transfers.counts()

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do, None if never."""
        return self._transfers.next_deadline()

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; the only way, with :meth:`tick`, that anything here changes."""
        match event:
            case Registration():
                return self._registrations.register(event, now, direct=True)
            case PooledRegistration(registration):
                return self._registrations.register(registration, now, direct=False)
            case PrefillProgress():
                return self._prefills.announce(event, now)
            case PrefillCompleted():
                return self._prefills.complete(event, now)
            case PrefillFailed():
                return self._prefills.fail(event)
            case WriteEnded():
                return self._joiner.end_write(event, now)
            case Cancel():
                return self._registrations.cancel(event, now, direct=True)
            case PooledCancel(cancel):
                return self._registrations.cancel(cancel, now, direct=False)
            case Released(word):
                return self._registrations.release_unserved(word)
            case Wanted():
                return self._prefills.keep(event, now)
            case Delivered():
                return self._registrations.deliver(event)
            case SinkJoined():
                return self._join(event, now)
            case SinkLeft():
                return self._leave(event)
            case SinkRefused():
                return self._refuse(event)
            case Drain():
                return self._drain()
            case LeaseEcho():
                heard = self._registrations.hear(event)
                return self._joiner.match_all(event.sink_engine, now) if heard else [Reject("stale epoch")]

    def pulse(self, now: float) -> Pulse:
        """The pulse to send now; see :mod:`kvbus.protocol.lease`."""
        me = self._answers
        return Pulse(me.engine, me.incarnation, me.rank, self._sinks.pulse(now))

    def tick(self, now: float) -> list[Effect]:
        """End what has waited too long: completions without registration, and registrations without prefill."""
        effects: list[Effect] = []
        for key, transfer in self._transfers.due(now):
            if transfer.stage is Stage.WRITING:
                continue
            if transfer.completion is None and not transfer.acknowledged and not transfer.lowest_attempt:
                self._transfers.drop(key)  # an unclaimed registration from the pool: not ours to answer
                effects.append(Reject("unclaimed registration"))
            else:
                effects += self._joiner.end(key, transfer, Outcome.EXPIRED)
        return effects

    def _drain(self) -> list[Effect]:
        self._transfers.draining = True
        effects: list[Effect] = []
        for key, transfer in self._transfers:
            if transfer.stage is not Stage.WRITING:
                effects += self._joiner.end(key, transfer, Outcome.DRAINED)
        return effects

    def _join(self, sink: SinkJoined, now: float) -> list[Effect]:
        if not self._sinks.join(sink):
            return [Reject("stale incarnation")]
        for _, transfer, registration in self._transfers.waiting_for(sink.engine):
            if registration.sink_incarnation < sink.incarnation:
                transfer.forget()
        return self._joiner.match_all(sink.engine, now)

    def _leave(self, left: SinkLeft) -> list[Effect]:
        self._sinks.leave(left)
        for _, transfer in self._transfers:
            registration = transfer.registration
            if registration is None or registration.sink_engine != left.engine:
                continue
            if registration.sink_incarnation > left.incarnation or transfer.stage is Stage.WRITING:
                continue
            if transfer.stage is Stage.WRITTEN:
                transfer.close_attempt()  # the KV stays: another decode engine may take over
            else:
                transfer.forget()
        return []

    def _refuse(self, refused: SinkRefused) -> list[Effect]:
        self._sinks.refuse(refused)
        effects: list[Effect] = []
        for _, transfer, registration in self._transfers.waiting_for(refused.engine):
            if registration.sink_incarnation == refused.incarnation:
                acknowledged = transfer.acknowledged
                transfer.forget()
                if acknowledged:
                    effects.append(self._answers.refused(registration, refused.reason))
        return effects
