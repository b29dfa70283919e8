"""Cuts a request's path at the marks of every process: marks in, stages out. Pure. See :mod:`kvbus.trace.path`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvbus.trace.history import Cut, history_cuts, history_of, number_in
from kvbus.trace.path import GAP_NS, WHOLE, Mark, MarkName, Outcome, Path, Stage, StageName

_BOUNDARIES = (
    (StageName.PREFILL_QUEUE, MarkName.PREFILL_SCHEDULED),
    (StageName.PREFILL_COMPUTE, MarkName.PREFILL_DONE),
    (StageName.MATCH_WAIT, None),
    (StageName.WRITE_QUEUE, MarkName.POSTING),
    (StageName.WRITE_POST, MarkName.POSTED),
    (StageName.WRITE_TRANSFER, MarkName.LANDED),
    (StageName.DECODE_RESUME, MarkName.RESUMED),
)


def path_of(marks: Iterable[Mark]) -> Path | None:
    """The path that these marks of one request make; None if they do not tell when it began and ended."""
    return _PathBuilder(sorted(marks, key=lambda mark: mark.at_ns)).path()


_OF_PREFILL = frozenset({MarkName.PREFILL_ARRIVED, MarkName.PREFILL_SCHEDULED, MarkName.PREFILL_DONE})
_BY_PREFILL = _OF_PREFILL | {
    MarkName.REGISTERED,
    MarkName.COMPLETED,
    MarkName.POSTING,
    MarkName.POSTED,
    MarkName.WRITTEN,
    MarkName.HISTORY_NOT_ASKED,
    MarkName.HISTORY_ASKED,
    MarkName.HISTORY_OFFERED,
    MarkName.HISTORY_DECLINED,
    MarkName.HISTORY_REGISTERING,
    MarkName.HISTORY_RECEIVED,
    MarkName.HISTORY_FAILED,
}


@dataclass(slots=True)
class _PathBuilder:
    marks: Sequence[Mark]
    stages: list[Stage] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    source: str = ""  # the prefill engine whose KV came
    attempt: int | None = None  # under which it came

    def path(self) -> Path | None:
        start = self._first(MarkName.ARRIVED) or self._first(MarkName.PREFILL_ARRIVED, MarkName.DECODE_ARRIVED)
        token, end = self._token(), self._last(MarkName.ENDED)
        end = end or token
        if start is None or end is None:
            return None
        outcome, reason = (Outcome.FAILED, _why(end)) if token is None else self._outcome()
        last = token or end
        losses = self._find_losses(last.at_ns)
        cursor = start.at_ns
        for loss in losses:
            cursor = self._add_stages(cursor, loss.at_ns, clamp=not self.stages)
            cursor = self._add(StageName.LOST, cursor, loss)
        if outcome in (Outcome.PUSHED, Outcome.UNKNOWN):
            self._choose_source()
            cursor = self._add_stages(cursor, last.at_ns, clamp=not losses, complain=True)
            self._add(StageName.FIRST_TOKEN, cursor, last)
        else:
            self._add_local_stages(cursor, last, outcome)
        return self._finish(start, last, end, outcome, reason, losses)

    def _add_local_stages(self, cursor: int, last: Mark, outcome: Outcome) -> None:
        """Add the stages of a request for which no KV came."""
        ends_route = self._first(MarkName.DECODE_ARRIVED) or self._first(MarkName.SENT)
        if not self.stages and ends_route is not None and ends_route.at_ns < last.at_ns:
            cursor = self._add(StageName.ROUTE, cursor, ends_route)
        given_up = self._last(MarkName.LOCAL, MarkName.GIVEN_UP)
        if given_up is not None and cursor < given_up.at_ns < last.at_ns:
            waited = StageName.DECODE_QUEUE if outcome is Outcome.LOCAL else StageName.LOST
            cursor = self._add(waited, cursor, given_up)
        self._add(StageName.LOST if outcome is Outcome.FAILED else StageName.DECODE_COMPUTE, cursor, last)

    def _choose_source(self) -> None:
        """Find whose KV came. Another engine that was lost, and is alive again, may have gone on marking."""
        received = self._last(MarkName.RECEIVED)
        posted = [mark for mark in self._all(MarkName.POSTING) if received is None or mark.attempt == received.attempt]
        if posted:
            self.source, self.attempt = posted[-1].engine, posted[-1].attempt
        elif received is not None:
            self.attempt = received.attempt

    def _finish(self, start: Mark, token: Mark, end: Mark, outcome: Outcome, reason: str, losses: list[Mark]) -> Path:
        late_side, late_by_ns = self._lateness()
        done = next((mark for mark in reversed(self._all(MarkName.PREFILL_DONE)) if self._belongs(mark)), None)
        sink = self._last(MarkName.SENT) or self._last(MarkName.DECODE_ARRIVED)
        sent, deferred = self._first(MarkName.SENT), self._first(MarkName.DEFERRED)
        registrations = [mark for mark in self._all(MarkName.REGISTERING) if mark.attempt == self.attempt]
        registering = registrations[-1] if registrations else None
        prompt_tokens = number_in(done.note) if done is not None else 0
        return Path(
            tuple(self.stages),
            start.at_ns,
            max(token.at_ns, self.stages[-1].end_ns),
            max(end.at_ns, self.stages[-1].end_ns),
            outcome,
            next((loss.note for loss in losses if loss.name == MarkName.ENGINE_LOST), reason),
            router_ns=sent.at_ns - start.at_ns if sent is not None and start.name == MarkName.ARRIVED else 0,
            deferred=deferred.note if deferred is not None else "",
            attempts=max((mark.attempt for mark in self.marks), default=1) or 1,
            late_side=late_side,
            late_by_ns=late_by_ns,
            registering=registering if late_side else None,
            completing=done if late_side else None,
            prefill_engine=self.source or (done.engine if done is not None else ""),
            decode_engine=sink.engine if sink is not None else "",
            prompt_tokens=prompt_tokens,
            nbytes=sum(number_in(mark.note) for mark in self._all(MarkName.WRITTEN) if self._belongs(mark)),
            status=end.note if end.name == MarkName.ENDED else "",
            missing=tuple(self.missing),
            history=history_of(self._ours(), prompt_tokens, registering),
        )

    def _lateness(self) -> tuple[str, int]:
        """Whom the match waited for, and for how long the other side did, ns; empty if there was none."""
        matched = [mark for mark in self._all(MarkName.POSTING) if self._belongs(mark)] if self.attempt else []
        registered, completed = self._halves(matched[-1].rank) if matched else (None, None)
        if registered is None or completed is None:
            return "", 0
        late_side = "decode" if registered.at_ns >= completed.at_ns else "prefill"
        return late_side, abs(registered.at_ns - completed.at_ns)

    def _token(self) -> Mark | None:
        """The first token, as the client saw it; without a stream, as decode did."""
        seen, own, ended = self._first(MarkName.FIRST_TOKEN), self._last(MarkName.TOKEN), self._last(MarkName.ENDED)
        if seen is not None and seen.note == WHOLE and own is not None and own.at_ns < seen.at_ns:
            return own
        return seen or (own if ended is None else None)

    def _outcome(self) -> tuple[Outcome, str]:
        local, received = self._last(MarkName.LOCAL), self._last(MarkName.RECEIVED)
        if received is not None and (local is None or local.at_ns < received.at_ns):
            return Outcome.PUSHED, ""
        given_up, sent = self._last(MarkName.GIVEN_UP), self._last(MarkName.SENT)
        if given_up is not None:
            return Outcome.RECOMPUTED, given_up.note
        if local is not None:
            return Outcome.LOCAL, local.note
        if sent is not None and sent.note == "alone":
            return Outcome.ALONE, ""
        return Outcome.PUSHED if self._last(MarkName.LANDED) else Outcome.UNKNOWN, ""

    def _find_losses(self, before_ns: int) -> list[Mark]:
        """Engines that the router lost, and receives that decode gave up for another reason."""
        engines = [mark for mark in self._all(MarkName.ENGINE_LOST) if mark.at_ns < before_ns]
        receives = [
            mark
            for mark in self._all(MarkName.GIVEN_UP)
            if mark.at_ns < before_ns and mark.attempt > len(engines)  # each lost engine costs an attempt
        ]
        return sorted([*engines, *receives], key=lambda mark: mark.at_ns)

    def _add_stages(self, cursor: int, until_ns: int, *, clamp: bool, complain: bool = False) -> int:
        """Add the stages whose marks lie between the two.

        Args:
            clamp: also those that seem to end before they begin: nothing of another attempt can be among them.
            complain: name stages whose marks are not there, unless an attempt before may have had them.
        """
        for name, all_marks, needed in self._cuts(clamp):
            marks = [mark for mark in all_marks if mark.at_ns > cursor or clamp]
            inside = sorted((mark for mark in marks if mark.at_ns <= until_ns), key=lambda mark: -mark.at_ns)
            if inside:
                cursor = self._add(name, cursor, *inside)
            elif complain and not marks and needed:
                self.missing.append(name)
        return cursor

    def _cuts(self, clamp: bool) -> Iterator[Cut]:
        """Where stages end, in their order."""
        yield Cut(StageName.ROUTE, self._boundary(MarkName.PREFILL_ARRIVED), clamp)
        for cut in history_cuts(self._ours()):
            yield cut._replace(needed=cut.needed and clamp)
        for name, mark_name in _BOUNDARIES:
            yield Cut(name, self._boundary(mark_name), clamp or mark_name not in _OF_PREFILL)

    def _boundary(self, name: MarkName | None) -> list[Mark]:
        """The marks of every rank that end a stage; None: of the match."""
        if name is not None:
            return [mark for mark in self._all(name) if self._belongs(mark)]
        pairs = [self._halves(rank) for rank in sorted({mark.rank for mark in self._all(MarkName.POSTING)})]
        return [max(one, two, key=lambda mark: mark.at_ns) for one, two in pairs if one is not None and two is not None]

    def _halves(self, rank: int) -> tuple[Mark | None, Mark | None]:
        """When this rank knew the registration, and the completion."""
        found = {mark.name: mark for mark in self._ours() if mark.rank == rank}
        return found.get(MarkName.REGISTERED), found.get(MarkName.COMPLETED)

    def _belongs(self, mark: Mark) -> bool:
        """Whether it is of the prefill engine and the attempt whose KV came, if that is known."""
        if self.source and mark.name in _BY_PREFILL and mark.engine != self.source:
            return False
        return self.attempt is None or mark.attempt in (0, self.attempt)

    def _ours(self) -> list[Mark]:
        return [mark for mark in self.marks if self._belongs(mark)]

    def _add(self, name: StageName, cursor: int, mark: Mark, *ranks: Mark) -> int:
        start = cursor + GAP_NS if self.stages else cursor
        end = max(mark.at_ns, start + GAP_NS)
        self.stages.append(Stage(name, start, end, mark, (mark, *ranks)))
        return end

    def _all(self, *names: MarkName) -> list[Mark]:
        return [mark for mark in self.marks if mark.name in names]

    def _first(self, *names: MarkName) -> Mark | None:
        return next((mark for mark in self.marks if mark.name in names), None)

    def _last(self, *names: MarkName) -> Mark | None:
        return next((mark for mark in reversed(self.marks) if mark.name in names), None)


def _why(end: Mark) -> str:
    return f"status {end.note}" if end.note.isdigit() else end.note
