"""The decode engine's half of each transfer: what it registers, cancels and has received. Pure."""

from __future__ import annotations

from kvbus.protocol.prefill.answers import Answers
from kvbus.protocol.prefill.claims import Claim, claim_of
from kvbus.protocol.prefill.decode_peers import Epoch, Sinks
from kvbus.protocol.prefill.events import Effect, Introduce, Reject, Send
from kvbus.protocol.prefill.joiner import Joiner
from kvbus.protocol.prefill.table import Holds, Transfers
from kvbus.protocol.prefill.transfer import Ending, Outcome, Stage, Transfer
from kvbus.wire import Cancel, Delivered, LeaseEcho, Registration, Release


class Registrations:
    """See the module's docstring; part of :class:`~kvbus.protocol.prefill.matcher.Matcher`."""

    def __init__(self, transfers: Transfers, joiner: Joiner, sinks: Sinks, answers: Answers, holds: Holds) -> None:
        self._transfers, self._joiner, self._sinks = transfers, joiner, sinks
        self._answers, self._holds = answers, holds

    def register(self, registration: Registration, now: float, *, direct: bool) -> list[Effect]:
        """Blocks are ready for this transfer's KV. ``direct``: it was sent to this engine, not to the pool."""
        if (refused := self._refuse(registration, direct=direct)) is not None:
            return refused
        key = registration.transfer_id
        if (transfer := self._transfers.open(key)) is None:
            if not direct:
                return [Reject("full")]
            # The decode engine frees its blocks for this answer: it must hold for ever.
            self._transfers.remember(key, Ending(Outcome.FULL, registration.attempt))
            return [self._answers.refused(registration, Outcome.FULL.value)]
        bound = direct and registration.source_incarnation == self._answers.incarnation
        claim = claim_of(registration, transfer, direct=direct, bound=bound)
        match claim:
            case Claim.REPEATED:
                return self._repeat(registration, transfer, now)
            case Claim.OLDER:
                transfer.close_before(registration.attempt + 1)
                superseded = self._answers.refused(registration, Outcome.SUPERSEDED.value)
                return [superseded if direct else Reject("stale attempt")]
            case Claim.OTHER:
                used_up = self._answers.refused(registration, Outcome.DONE.value)
                return [used_up if transfer.stage is Stage.WRITTEN else Reject("stale attempt")]
            case Claim.POOLED:
                return [Reject("bound already")]
            case Claim.NEWER if transfer.stage is Stage.WRITING:
                # The old attempt's WRITE cannot be taken back; the new one is re-sent until it has ended.
                transfer.highest_attempt = max(transfer.highest_attempt, registration.attempt)
                return [Reject("write in progress")]
            case Claim.FIRST | Claim.CONFIRMED | Claim.NEWER:
                superseded_too = self._make_way(transfer, claim)
                if claim is not Claim.CONFIRMED:
                    transfer.registered_at = now
                if claim is not Claim.FIRST:
                    transfer.highest_attempt = max(transfer.highest_attempt, registration.attempt)
                transfer.registration, transfer.bound = registration, bound
                return superseded_too + self._hold(registration, transfer, now, direct=direct)

    def cancel(self, cancel: Cancel, now: float, *, direct: bool) -> list[Effect]:
        """The decode engine does not want this attempt, and perhaps no other, any more."""
        transfer = self._transfers.get(cancel.transfer_id)
        if transfer is None:
            return self._cancel_unknown(cancel, now, direct=direct)
        held = transfer.registration
        if held is not None and cancel.attempt < held.attempt:
            transfer.close_before(cancel.attempt + 1)  # another attempt has taken its place: it is not written
            return [self._answers.cancelled(cancel)]
        if held is not None and cancel.attempt == held.attempt and cancel.sink_engine != held.sink_engine:
            return [Reject("stale cancel")]
        if transfer.bound and not direct:
            return [Reject("stale cancel")]  # its decode engine knows us, and cancels here
        if transfer.stage is Stage.WRITING:
            transfer.cancel = cancel  # acknowledged when the WRITE has ended
            return []
        return self._joiner.give_up(cancel, transfer, now)

    def deliver(self, delivered: Delivered) -> list[Effect]:
        """The first token is out: nobody will have to take over, so the KV may go."""
        key, transfer = delivered.transfer_id, self._transfers.get(delivered.transfer_id)
        if transfer is None or delivered.attempt < transfer.highest_attempt:
            return [Reject("late delivery")]  # or another decode engine waits for its KV
        held = transfer.registration
        if held is None and transfer.completion is not None:  # the WRITE was taken for failed, and it was not
            return self._transfers.end(key, transfer, Outcome.DONE)
        if held is None or (held.attempt, held.request_id) != (delivered.attempt, delivered.request_id):
            return [Reject("late delivery")]
        match transfer.stage:
            case Stage.WRITTEN:
                return self._transfers.end(key, transfer, Outcome.DONE, transfer.done, told=True)
            case Stage.WRITING:
                transfer.delivered = True
                return []
            case Stage.WAITING:
                return [Reject("delivered before it was written")]

    def release_unserved(self, word: Release) -> list[Effect]:
        """A router's word, which any client of the bus may say: a WRITE that is under way is left alone, and a decode
        engine that waits for one is told that none will come."""
        key, transfer = word.transfer_id, self._transfers.get(word.transfer_id)
        if transfer is None:
            if self._transfers.ending(key) is None:  # the prefill may still come, and shall free its blocks at once
                self._transfers.remember(key, Ending(Outcome.CANCELLED, word.attempt))
            return []
        if transfer.stage is Stage.WRITING or word.attempt < transfer.highest_attempt:
            return [Reject("release of what is served")]
        if transfer.done is not None:
            return self._transfers.end(key, transfer, Outcome.DONE, transfer.done, told=True)
        held = transfer.registration if transfer.acknowledged else None
        told: list[Effect] = [self._answers.refused(held, Outcome.CANCELLED.value)] if held is not None else []
        return told + self._transfers.end(key, transfer, Outcome.CANCELLED)

    def hear(self, heard: Registration | LeaseEcho) -> bool:
        """Take the echoes in ``heard`` and forget what older epochs registered; False if it is of one itself."""
        epoch = self._sinks.hear(heard)
        if epoch is Epoch.NEWER:
            for _, transfer, held in self._transfers.waiting_for(heard.sink_engine):
                if held.sink_incarnation == heard.sink_incarnation and held.epoch < heard.epoch:
                    transfer.forget()
        return epoch is not Epoch.OLDER

    def _refuse(self, registration: Registration, *, direct: bool) -> list[Effect] | None:
        """What is said to a registration that is not held, whatever its transfer is; None if it may be held."""
        if registration.source_incarnation not in (0, self._answers.incarnation):
            return [Reject("for another incarnation")]
        if direct and not self.hear(registration):
            return [Reject("stale epoch")]
        if self._transfers.draining:
            return [self._answers.refused(registration, Outcome.DRAINED.value) if direct else Reject("draining")]
        sink = (registration.sink_engine, registration.sink_incarnation)
        if self._sinks.is_stale(*sink):
            return [Reject("stale incarnation")]
        if refusal := self._sinks.refusal(*sink):
            return [self._answers.refused(registration, refusal) if direct else Reject("unfit sink")]
        ending = self._transfers.ending(registration.transfer_id)
        if ending is None:
            return None
        if ending.outcome in (Outcome.CANCELLED, Outcome.FULL) and not direct:
            return [Reject("late registration")]  # a cancel to the pool is remembered by engines that it did not mean
        if ending.reply is not None and ending.answers(registration):
            return [Send(registration.sink_engine, ending.reply)]  # word of the end was lost
        if registration.attempt < ending.attempt:
            return [Reject("stale attempt")]
        return [self._answers.refused(registration, ending.outcome.value)]

    def _repeat(self, registration: Registration, transfer: Transfer, now: float) -> list[Effect]:
        """It was sent again, because it or its acknowledgement was lost or is still under way."""
        if transfer.done is not None:
            return [Send(registration.sink_engine, transfer.done)]
        transfer.registration = registration
        effects: list[Effect] = []
        if transfer.acknowledged:
            effects.append(self._answers.held(registration, claimed=transfer.is_here))
        effects += self._joiner.match(registration.transfer_id, transfer, now)
        return effects or [Reject("duplicate registration")]

    def _make_way(self, transfer: Transfer, claim: Claim) -> list[Effect]:
        """For a registration that is taken: forget what is held, and tell a decode engine that was promised a WRITE."""
        held = transfer.registration
        if held is None or claim is Claim.CONFIRMED:
            return []
        if claim is Claim.FIRST:
            transfer.forget()
            return []
        told = transfer.acknowledged and transfer.done is None
        transfer.close_attempt()
        return [self._answers.refused(held, Outcome.SUPERSEDED.value)] if told else []

    def _hold(self, registration: Registration, transfer: Transfer, now: float, *, direct: bool) -> list[Effect]:
        transfer.acknowledged = direct or transfer.is_here
        effects: list[Effect] = []
        if transfer.acknowledged:
            effects.append(self._answers.held(registration, claimed=transfer.is_here))
        if self._sinks.get(registration.sink_engine, registration.sink_incarnation) is None:
            effects.append(Introduce(registration.sink_engine))
        if transfer.completion is None:
            hold_s = self._holds.registration_hold_s if transfer.acknowledged else self._holds.pool_hold_s
            self._transfers.wait(registration.transfer_id, now + hold_s)
        return effects + self._joiner.match(registration.transfer_id, transfer, now)

    def _cancel_unknown(self, cancel: Cancel, now: float, *, direct: bool) -> list[Effect]:
        key = cancel.transfer_id
        known = self._transfers.ending(key) is not None
        if not known and cancel.release:  # the prefill may still come, and shall then free its blocks at once
            self._transfers.remember(key, Ending(Outcome.CANCELLED, cancel.attempt))
        if known or cancel.release:
            return [self._answers.cancelled(cancel)] if known or direct else [Reject("foreign cancel")]
        if not direct:
            return [Reject("foreign cancel")]
        transfer = self._transfers.open(key)
        return [Reject("full")] if transfer is None else self._joiner.give_up(cancel, transfer, now)
