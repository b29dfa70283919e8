"""The prefill's half of each transfer: what this engine's own scheduler says of it. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvbus.protocol.prefill.answers import Answers
from kvbus.protocol.prefill.events import Effect, Reject, Send
from kvbus.protocol.prefill.joiner import Joiner
from kvbus.protocol.prefill.table import Holds, Transfers
from kvbus.protocol.prefill.transfer import Outcome, Stage, Transfer
from kvbus.wire import NO_TOKEN, PrefillCompleted, PrefillFailed, PrefillProgress, Wanted


class Prefills:
    """See the module's docstring; part of :class:`~kvbus.protocol.prefill.matcher.Matcher`."""

    def __init__(self, transfers: Transfers, joiner: Joiner, answers: Answers, holds: Holds) -> None:
        self._transfers, self._joiner, self._answers, self._holds = transfers, joiner, answers, holds

    def announce(self, progress: PrefillProgress, now: float) -> list[Effect]:
        """The request is in the scheduler, or has come further."""
        key = progress.transfer_id
        if not self._answers.is_ours(progress):
            return [Reject("foreign prefill")]
        if self._transfers.ending(key) is not None:
            return [Reject("late progress")]
        if (transfer := self._transfers.open(key)) is None:
            return [Reject("full")]
        transfer.announced, transfer.progress = True, progress
        if transfer.completion is not None:
            return []
        self._transfers.wait(key, now + self._holds.registration_hold_s)
        if transfer.registration is None:
            return self._tell_watcher(transfer, progress)
        transfer.acknowledged = True
        # This is how the decode engine learns that the request is here.
        return [self._answers.held(transfer.registration, claimed=True)]

    def complete(self, completion: PrefillCompleted, now: float) -> list[Effect]:
        """The prompt's KV is in this engine's blocks."""
        key = completion.transfer_id
        if not self._answers.is_ours(completion):
            return [Reject("foreign prefill")]
        if self._transfers.has_released(completion.request_id):
            return [Reject("duplicate completion")]
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.completion is not None:
            if transfer.completion.request_id == completion.request_id:
                return [Reject("duplicate completion")]
            return [*self._transfers.release(completion), Reject("transfer id reused")]
        if self._transfers.ending(key) is not None:
            return [*self._transfers.release(completion), Reject("late completion")]
        if (transfer := self._transfers.open(key)) is None:
            return [*self._transfers.release(completion), Reject("full")]
        transfer.completion, transfer.completed_at = completion, now
        self._transfers.wait(key, now + self._holds.block_lease_s)
        if transfer.registration is None:
            return self._tell_watcher(transfer, completion)
        registration, effects = transfer.registration, list[Effect]()
        if not transfer.acknowledged:
            transfer.acknowledged = True
            effects.append(self._answers.held(registration, claimed=True))
        effects += self._joiner.match(key, transfer, now)
        if not effects and not transfer.announced:  # the word of its arrival was lost, and the match waits
            effects.append(self._answers.held(registration, claimed=True))
        return effects

    def fail(self, failed: PrefillFailed) -> list[Effect]:
        """There will be no KV."""
        key, transfer = failed.transfer_id, self._transfers.get(failed.transfer_id)
        if not self._answers.is_ours(failed):
            return [Reject("foreign prefill")]
        if transfer is not None and transfer.completion is not None:
            return [Reject("failure after completion")]
        if self._transfers.ending(key) is not None:
            return [Reject("late failure")]
        watching = transfer.watching if transfer is not None and transfer.registration is None else ""
        effects = self._joiner.end(key, transfer or Transfer(), Outcome.NO_PREFILL, failed.reason)
        return [*effects, Send(watching, failed)] if watching and not self._answers.rank else effects

    def keep(self, wanted: Wanted, now: float) -> list[Effect]:
        """L1: the decode engine's queue may be longer than the block lease. It also wants to know of the prefill."""
        key, sink = wanted.transfer_id, wanted.sink_engine
        if ending := self._transfers.ending(key):
            failed = ending.outcome is Outcome.NO_PREFILL and self._answers.rank == 0
            return [Send(sink, self._answers.prefill_failed(key))] if failed else [Reject("nothing to keep")]
        is_new = self._transfers.get(key) is None
        if (transfer := self._transfers.open(key)) is None:
            return [Reject("full")]
        if is_new:
            self._transfers.wait(key, now + self._holds.pool_hold_s)  # it is asked again
        if transfer.stage is Stage.WRITING:
            return [Reject("nothing to keep")]
        transfer.watching = sink
        transfer.highest_attempt = max(transfer.highest_attempt, wanted.attempt)
        if transfer.completion is not None:
            self._transfers.wait(key, now + self._holds.block_lease_s)
        return self._tell_watcher(transfer, transfer.completion or transfer.progress)

    def _tell_watcher(self, transfer: Transfer, word: PrefillProgress | PrefillCompleted | None) -> list[Effect]:
        """All ranks hear the same of the scheduler: the first one passes it on."""
        if not transfer.watching or word is None or self._answers.rank:
            return []
        if isinstance(word, PrefillCompleted):
            word = replace(word, blocks=(), first_token=NO_TOKEN)
        return [Send(transfer.watching, word)]
