"""The join: posts a transfer's WRITE once everything that it needs is there, and ends it. Pure.

A WRITE needs both halves, the decode engine's memory, and a write lease of it (:mod:`kvbus.protocol.lease`).
"""

from __future__ import annotations

from kvbus.protocol.prefill.answers import Answers
from kvbus.protocol.prefill.decode_peers import Sinks
from kvbus.protocol.prefill.events import Effect, PostWrite, Reject, Send, WriteEnded
from kvbus.protocol.prefill.table import Holds, Transfers
from kvbus.protocol.prefill.transfer import Outcome, Stage, Step, Transfer, mismatch, write_job
from kvbus.wire import Cancel, TransferDone, TransferFailed


class Joiner:
    """See the module's docstring; part of :class:`~kvbus.protocol.prefill.matcher.Matcher`."""

    def __init__(self, transfers: Transfers, sinks: Sinks, answers: Answers, holds: Holds) -> None:
        self._transfers, self._sinks, self._answers, self._holds = transfers, sinks, answers, holds

    def match(self, key: str, transfer: Transfer, now: float) -> list[Effect]:
        """Post the WRITE if it may be posted now."""
        registration, completion = transfer.registration, transfer.completion
        if registration is None or completion is None or transfer.stage is not Stage.WAITING:
            return []
        if not transfer.bound:
            transfer.held_up = "a registration that is sent to this engine itself"
            return []
        sink = self._sinks.get(registration.sink_engine, registration.sink_incarnation)
        if sink is None:
            transfer.held_up = "the decode engine's memory to be known here"
            return []  # SinkJoined matches again
        if reason := mismatch(registration, completion, sink):
            return self.end(key, transfer, Outcome.FAILED, reason)
        if not self._sinks.may_write(sink, now):
            transfer.held_up = "a write lease of the decode engine"
            return []  # LeaseEcho matches again
        transfer.take(Step.POST)
        transfer.writing_since = now
        self._transfers.wait_no_more(key)
        known = (transfer.registered_at, transfer.completed_at)
        job = write_job(registration, completion, *known, transfer.held_up)
        return [PostWrite(job), self._answers.started(registration)]

    def match_all(self, sink: str, now: float) -> list[Effect]:
        """Likewise for all that wait for this decode engine."""
        return [
            effect
            for key, transfer, _ in self._transfers.waiting_for(sink)
            for effect in self.match(key, transfer, now)
        ]

    def end_write(self, ended: WriteEnded, now: float) -> list[Effect]:
        """A WRITE is over: what was put off until then is done now."""
        key, transfer = ended.transfer_id, self._transfers.get(ended.transfer_id)
        held = transfer.registration if transfer is not None else None
        if transfer is None or held is None or transfer.stage is not Stage.WRITING or held.attempt != ended.attempt:
            return [Reject("unknown write")]
        if transfer.cancel is not None:
            return self.give_up(transfer.cancel, transfer, now)
        if ended.failure and self._transfers.draining:
            return self.end(key, transfer, Outcome.FAILED, ended.failure)
        if ended.failure:
            # Its decode engine may be dead and another about to take over. One that lives cancels, which frees.
            return self._await_next_attempt(key, transfer, now, self._answers.failed(held, ended.failure, kept=True))
        done = self._answers.done(held, transfer, ended.nbytes, now)
        if transfer.delivered or self._transfers.draining:  # the first token can be faster than word of the WRITE's end
            return self._transfers.end(key, transfer, Outcome.DONE, done)
        sink_left = self._sinks.get(held.sink_engine, held.sink_incarnation) is None
        if sink_left or transfer.highest_attempt > held.attempt:
            return self._await_next_attempt(key, transfer, now, done)
        transfer.take(Step.FINISH)
        transfer.done = done
        self._transfers.wait(key, now + self._holds.block_lease_s)
        return [Send(held.sink_engine, done)]

    def give_up(self, cancel: Cancel, transfer: Transfer, now: float) -> list[Effect]:
        """No WRITE is posted for the attempt that is cancelled, and none will be."""
        key, cancelled = cancel.transfer_id, self._answers.cancelled(cancel)
        if cancel.release and cancel.attempt >= transfer.highest_attempt:
            return [*self._transfers.end(key, transfer, Outcome.CANCELLED), cancelled]
        transfer.close_attempt()
        transfer.close_before(cancel.attempt + 1)
        self._transfers.wait(key, now + self._holds.block_lease_s)
        return [cancelled]

    def end(self, key: str, transfer: Transfer, outcome: Outcome, reason: str = "") -> list[Effect]:
        """End a transfer and tell its decode engine, if it has one and nothing was written for it."""
        if transfer.done is not None:
            return self._transfers.end(key, transfer, Outcome.DONE, transfer.done, told=True)
        held = transfer.registration
        failed = self._answers.failed(held, reason or outcome.value) if held is not None else None
        return self._transfers.end(key, transfer, outcome, failed)

    def _await_next_attempt(
        self, key: str, transfer: Transfer, now: float, word: TransferDone | TransferFailed
    ) -> list[Effect]:
        """This attempt is over, and ``word`` says how; the KV stays for another one, for a block lease."""
        sink = transfer.registration.sink_engine if transfer.registration is not None else ""
        transfer.close_attempt()
        self._transfers.wait(key, now + self._holds.block_lease_s)
        return [Send(sink, word)]
