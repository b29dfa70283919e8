"""Giving blocks back to vLLM: when it is certain that nothing is written into them any more. Pure.

The one rule: a receive is abandoned only when every prefill rank that may write into it has said done, failed or
cancel-acknowledged, or its write lease has certainly run out. Until then the blocks may still be written.

Whoever did not answer may hold the registration still. So a new *epoch* begins: every registration that is wanted is
sent again in it, and a prefill rank that hears of it forgets what older epochs registered before it writes again.
"""

from __future__ import annotations

from dataclasses import replace

from kvbus.protocol import SinkLease
from kvbus.protocol.decode.events import Abandon, Echo, Effect, Publish
from kvbus.protocol.decode.receives import FIRST_RESEND_S, Phase, Receive, Receives, Step
from kvbus.wire import Cancel, Pulse

MAX_REASON_CHARS = 256


class GiveBack:
    """What is sent for each receive, and the end of those that are given up.

    Args:
        lease: what this engine heard of prefill ranks and echoed.
        cancel_timeout_s: how long a cancel waits for its acknowledgement before the lease decides, seconds.
    """

    def __init__(self, receives: Receives, lease: SinkLease, cancel_timeout_s: float) -> None:
        self._receives, self._lease, self._cancel_timeout_s = receives, lease, cancel_timeout_s
        self._epoch = 0

    def publish(self, receive: Receive, now: float) -> Publish:
        """Its registration, or its cancel once it is given up."""
        receive.resend_later(now)
        registration = receive.registration
        if receive.is_given_up:
            cancel = Cancel(
                registration.transfer_id,
                registration.attempt,
                registration.sink_engine,
                registration.sink_incarnation,
                registration.request_id,
                reason=receive.reason[:MAX_REASON_CHARS],
                release=receive.release,
            )
            return Publish(receive.engine, cancel)
        if not receive.engine:
            return Publish("", replace(registration, epoch=self._epoch))
        receive.sent_to = receive.incarnation or self._lease.incarnation(receive.engine)
        echoes = () if self._is_silenced(receive.engine) else self._lease.echo(receive.engine)
        sent = replace(registration, source_incarnation=receive.sent_to, echoes=echoes, epoch=self._epoch)
        return Publish(receive.engine, sent)

    def hear(self, pulse: Pulse, now: float) -> list[Effect]:
        """Remember it, and echo it if this rank may have something to write for us."""
        engine = pulse.source_engine
        self._lease.hear((engine, pulse.source_incarnation, pulse.rank), pulse.number, now)
        wanted = self._receives.of_engine(engine) and not self._is_silenced(engine)
        echoes = self._lease.echo(engine) if wanted else ()
        return [Echo(engine, echoes, self._epoch)] if echoes else []

    def cancel(self, receive: Receive, reason: str, now: float) -> list[Effect]:
        """Give a receive up: ask whoever may write into it not to."""
        if receive.is_given_up:
            return []
        receive.take(Step.CANCEL)
        receive.reason = reason
        receive.patience_until = receive.give_up_at = now + self._cancel_timeout_s
        receive.resend_s = FIRST_RESEND_S
        if receive.is_answered:
            return self.fence(receive, now)
        effects: list[Effect] = [self.publish(receive, now)]
        self._receives.wait(receive)
        return effects

    def begin_fence(self, receive: Receive, reason: str, now: float) -> list[Effect]:
        """Nobody answers: stop echoing to whoever may write here, and wait until their leases have run out."""
        receive.reason = receive.reason or reason
        receive.take(Step.FENCE)
        return self.fence(receive, now)

    def fence(self, receive: Receive, now: float) -> list[Effect]:
        """Abandon it if no rank can be writing here: ranks that answered, and those whose lease has run out, cannot."""
        # To the pool no right to write is given: only a registration sent to an engine itself is one.
        safe_at = self._lease.safe_at(receive.engine, receive.incarnation, receive.ended) if receive.engine else now
        if now < safe_at:
            receive.take(Step.FENCE)
            self._receives.wait(receive, safe_at)
            return []
        self._receives.remove(receive.request_id)
        if receive.is_answered:
            return [Abandon(receive.request_id, receive.reason)]
        self._epoch += 1
        again = [self.publish(live, now) for live in self._receives.all() if not live.is_given_up]
        return [Abandon(receive.request_id, f"{receive.reason}; unanswered, fenced by the write lease"), *again]

    def forget(self, engine: str, incarnation: int, now: float) -> None:
        """This incarnation of a prefill engine is gone: no echo is owed to it."""
        self._lease.forget(engine, incarnation, now)

    def _is_silenced(self, engine: str) -> bool:
        """Whether this engine gets no echo, because a receive waits for its lease to run out."""
        return any(receive.phase is Phase.FENCING for receive in self._receives.of_engine(engine))
