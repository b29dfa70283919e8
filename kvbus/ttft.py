"""Where a request's time to first token went: marks in, a path of stages out. Pure.

Every process that has a hand in a request marks what happens when; the path is cut at those marks, so its stages
neither overlap nor leave a gap, and add up to the time from the request's arrival to its first token.

The one rule: a stage ends where its mark says, and the next one begins there. What was lost on the way, an engine or a
receive, is a stage of its own, :attr:`StageName.LOST`, however far it had come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

NS = 1_000_000_000
GAP_NS = 1_000
"""Between one stage's end and the next one's start: Jaeger drops a sibling that starts in the same microsecond."""


class MarkName(StrEnum):
    """What can be marked; by whom, and when."""

    # The router
    ARRIVED = "arrived"  # the client's request is read to its end of the headers
    ADMITTED = "admitted"  # it need not wait for others
    SENT = "sent"  # a decode leg goes out
    ENGINE_LOST = "engine lost"  # the note says why
    FIRST_TOKEN = "first token"  # the first bytes with a token go to the client; without a stream, the whole answer
    ENDED = "ended"  # the note is the status
    # A prefill engine's scheduler
    PREFILL_ARRIVED = "prefill arrived"
    PREFILL_SCHEDULED = "prefill scheduled"
    PREFILL_DONE = "prefill done"  # the note is the number of tokens
    PREFILL_FAILED = "prefill failed"
    # A prefill rank
    REGISTERED = "registered"  # the registration is known there
    COMPLETED = "completed"  # the completion is
    POSTING = "posting"
    POSTED = "posted"
    WRITTEN = "written"  # the note is the number of bytes
    WRITE_FAILED = "write failed"
    # A decode engine's scheduler
    DECODE_ARRIVED = "decode arrived"
    DEFERRED = "deferred"  # its blocks are not taken yet
    REGISTERING = "registering"  # blocks are taken, the registration goes out
    GIVEN_UP = "given up"  # the note says why
    LOCAL = "local"  # it computes the prompt itself; the note says why
    RECEIVED = "received"  # vLLM has taken the receive as finished
    RESUMED = "resumed"  # the first step with it is scheduled
    TOKEN = "token"  # that step has given its first token
    # A decode rank
    LANDED = "landed"  # every WRITE for it is in memory


class StageName(StrEnum):
    """Of a path, in the order in which they come."""

    ROUTE = "route"
    PREFILL_QUEUE = "prefill.queue"
    PREFILL_COMPUTE = "prefill.compute"
    MATCH_WAIT = "match.wait"
    WRITE_QUEUE = "write.queue"
    WRITE_POST = "write.post"
    WRITE_TRANSFER = "write.transfer"
    DECODE_RESUME = "decode.resume"
    LOST = "lost"
    DECODE_COMPUTE = "decode.compute"
    FIRST_TOKEN = "decode.first_token"


class Outcome(StrEnum):
    """How the prompt's KV came to the decode engine."""

    PUSHED = "pushed"
    RECOMPUTED = "recomputed"  # decode computed the prompt after a receive had failed
    LOCAL = "computed locally"  # decode computed the prompt without asking for it
    ALONE = "alone"  # nobody else was meant to
    FAILED = "failed"  # there was no first token


@dataclass(frozen=True, slots=True)
class Mark:
    """Something happened at ``at_ns``, on the clock of whoever collects; wrong by ``error_ns`` at most.

    ``offset_ns`` was added to bring it there; 0 on the same host. ``role``: prefill, decode or router.
    """

    name: str
    at_ns: int
    attempt: int = 0
    engine: str = ""
    role: str = "router"
    rank: int = 0
    note: str = ""
    offset_ns: int = 0
    error_ns: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a path; ``mark`` is what ended it, ``ranks`` likewise of every rank that took part."""

    name: StageName
    start_ns: int
    end_ns: int
    mark: Mark
    ranks: tuple[Mark, ...] = ()

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Path:
    """A request's way to its first token. Times in ns.

    Attributes:
        stages: each starts :data:`GAP_NS` after its predecessor's end.
        end_ns: of the whole answer.
        reason: of an outcome that is not PUSHED.
        late_side: whom the match waited for, ``prefill`` or ``decode``; empty if there was none.
        late_by_ns: for how long the other side had to wait.
        registering, completing: the messages that the match joined, as they were sent.
        missing: stages whose marks did not arrive; their time is in the stage after them.
    """

    stages: tuple[Stage, ...]
    start_ns: int
    first_token_ns: int
    end_ns: int
    outcome: Outcome
    reason: str = ""
    attempts: int = 1
    late_side: str = ""
    late_by_ns: int = 0
    registering: Mark | None = None
    completing: Mark | None = None
    prefill_engine: str = ""
    decode_engine: str = ""
    prompt_tokens: int = 0
    nbytes: int = 0
    status: str = ""
    missing: tuple[str, ...] = ()

    @property
    def ttft_ns(self) -> int:
        return self.first_token_ns - self.start_ns


_BOUNDARIES = (
    (StageName.ROUTE, MarkName.PREFILL_ARRIVED),
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
    return _Story(sorted(marks, key=lambda mark: mark.at_ns)).path()


@dataclass(slots=True)
class _Story:
    marks: Sequence[Mark]
    stages: list[Stage] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def path(self) -> Path | None:
        start = self._first(MarkName.ARRIVED) or self._first(MarkName.PREFILL_ARRIVED, MarkName.DECODE_ARRIVED)
        token = self._first(MarkName.FIRST_TOKEN) or self._last(MarkName.TOKEN)
        end = self._last(MarkName.ENDED) or token
        if start is None or end is None:
            return None
        token, failed = token or end, token is None
        outcome, reason = self._outcome(failed=failed)
        losses = self._losses(token.at_ns)
        cursor = start.at_ns
        for loss in losses:
            cursor = self._pass(cursor, loss.at_ns, attempt=None, clamp=not self.stages)
            cursor = self._add(StageName.LOST, cursor, loss)
        if outcome is Outcome.PUSHED:
            received = self._last(MarkName.RECEIVED)
            attempt = received.attempt if received is not None else None
            cursor = self._pass(cursor, token.at_ns, attempt=attempt, clamp=not losses)
            self._add(StageName.FIRST_TOKEN, cursor, token)
        else:
            ends_route = self._first(MarkName.DECODE_ARRIVED, MarkName.SENT)
            if not self.stages and ends_route is not None and ends_route.at_ns < token.at_ns:
                cursor = self._add(StageName.ROUTE, cursor, ends_route)
            given_up = self._last(MarkName.LOCAL) or self._last(MarkName.GIVEN_UP)
            if outcome is Outcome.RECOMPUTED and given_up is not None and cursor < given_up.at_ns < token.at_ns:
                cursor = self._add(StageName.LOST, cursor, given_up)
            self._add(StageName.LOST if failed else StageName.DECODE_COMPUTE, cursor, token)
        return self._finish(start, token, end, outcome, reason, losses)

    def _finish(self, start: Mark, token: Mark, end: Mark, outcome: Outcome, reason: str, losses: list[Mark]) -> Path:
        matched = self._last(MarkName.POSTING) if outcome is Outcome.PUSHED else None
        registered, completed = self._halves(matched.rank, matched.attempt) if matched is not None else (None, None)
        late_side, late_by_ns = "", 0
        if registered is not None and completed is not None:
            late_side = "decode" if registered.at_ns >= completed.at_ns else "prefill"
            late_by_ns = abs(registered.at_ns - completed.at_ns)
        done, written = self._last(MarkName.PREFILL_DONE), self._all(MarkName.WRITTEN)
        arrived, sent = self._last(MarkName.DECODE_ARRIVED), self._last(MarkName.SENT)
        sink, source = sent or arrived, done or self._last(MarkName.PREFILL_ARRIVED)
        return Path(
            tuple(self.stages),
            start.at_ns,
            max(token.at_ns, self.stages[-1].end_ns),
            max(end.at_ns, self.stages[-1].end_ns),
            outcome,
            next((loss.note for loss in losses if loss.name == MarkName.ENGINE_LOST), reason),
            attempts=max((mark.attempt for mark in self.marks), default=1) or 1,
            late_side=late_side,
            late_by_ns=late_by_ns,
            registering=self._last(MarkName.REGISTERING) if late_side else None,
            completing=done if late_side else None,
            prefill_engine=source.engine if source is not None else "",
            decode_engine=sink.engine if sink is not None else "",
            prompt_tokens=_number(done.note) if done is not None else 0,
            nbytes=sum(_number(mark.note) for mark in written),
            status=end.note if end.name == MarkName.ENDED else "",
            missing=tuple(self.missing),
        )

    def _outcome(self, *, failed: bool) -> tuple[Outcome, str]:
        if failed:
            end = self._last(MarkName.ENDED)
            return Outcome.FAILED, f"status {end.note}" if end is not None and end.note else ""
        local, received = self._last(MarkName.LOCAL), self._last(MarkName.RECEIVED)
        if received is not None and (local is None or local.at_ns < received.at_ns):
            return Outcome.PUSHED, ""
        given_up = self._last(MarkName.GIVEN_UP)
        if given_up is not None:
            return Outcome.RECOMPUTED, given_up.note
        if local is not None:
            return Outcome.LOCAL, local.note
        sent = self._last(MarkName.SENT)
        if sent is not None and sent.note == "alone":
            return Outcome.ALONE, ""
        return Outcome.PUSHED, ""  # what says so was lost

    def _losses(self, before_ns: int) -> list[Mark]:
        """Engines that the router lost, and receives that decode gave up for another reason."""
        engines = [mark for mark in self._all(MarkName.ENGINE_LOST) if mark.at_ns < before_ns]
        receives = [
            mark
            for mark in self._all(MarkName.GIVEN_UP)
            if mark.at_ns < before_ns and mark.attempt > len(engines)  # each lost engine costs an attempt
        ]
        return sorted([*engines, *receives], key=lambda mark: mark.at_ns)

    def _pass(self, cursor: int, until_ns: int, attempt: int | None, *, clamp: bool) -> int:
        """Add the stages whose marks lie between the two. ``clamp``: also those that seem to end before they begin."""
        for name, mark_name in _BOUNDARIES:
            found = self._boundary(mark_name, cursor, until_ns, attempt, early=clamp)
            if found:
                cursor = self._add(name, cursor, *found)
            elif attempt is not None and clamp:
                self.missing.append(name)
        return cursor

    def _boundary(
        self, name: MarkName | None, cursor: int, until_ns: int, attempt: int | None, *, early: bool
    ) -> list[Mark]:
        """The marks of every rank that end a stage, the last one first."""
        marks = self._matched(attempt) if name is None else self._all(name)
        of_attempt = [mark for mark in marks if mark.attempt in (0, attempt) or attempt is None]
        inside = [mark for mark in of_attempt if (early or mark.at_ns > cursor) and mark.at_ns <= until_ns]
        return sorted(inside, key=lambda mark: -mark.at_ns)

    def _matched(self, attempt: int | None) -> list[Mark]:
        ranks = {(mark.rank, mark.attempt) for mark in self._all(MarkName.POSTING) if attempt in (None, mark.attempt)}
        pairs = [self._halves(rank, each) for rank, each in sorted(ranks)]
        return [max(one, two, key=lambda mark: mark.at_ns) for one, two in pairs if one is not None and two is not None]

    def _halves(self, rank: int, attempt: int) -> tuple[Mark | None, Mark | None]:
        found: dict[str, Mark] = {
            mark.name: mark for mark in self.marks if mark.rank == rank and mark.attempt == attempt
        }
        return found.get(MarkName.REGISTERED), found.get(MarkName.COMPLETED)

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


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
