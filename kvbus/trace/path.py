"""Where a request's time to first token went: marks, and the path that :mod:`kvbus.trace.stages` makes of them. Pure.

Every process that serves a request marks what happens when; the path is cut at those marks, so its stages
neither overlap nor leave a gap, and add up to the time from the request's arrival to its first token.

The one rule: a stage ends where its mark says, and the next one begins there. What was lost on the way, an engine or a
receive, is a stage of its own, :attr:`StageName.LOST`, however far it had come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NS = 1_000_000_000
GAP_NS = 1_000
"""Between one stage's end and the next one's start: Jaeger drops a sibling that starts in the same microsecond."""
WHOLE = "whole"
"""The note of a FIRST_TOKEN that is a whole answer: decode's own word of its first token counts, where there is one."""


class MarkName(StrEnum):
    """What can be marked; by whom, and when."""

    # The router
    ARRIVED = "arrived"  # the client's request is read to its end of the headers
    SENT = "sent"  # a decode leg goes out
    ENGINE_LOST = "engine lost"  # the note says why
    FIRST_TOKEN = "first token"  # the first bytes with a token go to the client; the note is WHOLE without a stream
    ENDED = "ended"  # the note is the status, or why there is none
    # A prefill engine's scheduler
    PREFILL_ARRIVED = "prefill arrived"
    PREFILL_SCHEDULED = "prefill scheduled"  # the note is how many of its tokens need not be computed, if any
    PREFILL_DONE = "prefill done"  # the note is the number of tokens
    # Likewise, of the KV that a decode engine may have of the prompt's beginning
    HISTORY_NOT_ASKED = "history not asked"  # the note says why
    HISTORY_ASKED = "history asked"  # its turn has come: from now on it waits; the note is the decode engine
    HISTORY_OFFERED = "history offered"
    HISTORY_DECLINED = "history declined"  # the note says why
    HISTORY_REGISTERING = "history registering"  # vLLM has found blocks, which it had not when it was offered
    HISTORY_RECEIVED = "history received"  # the note is the number of tokens
    HISTORY_FAILED = "history failed"  # the note says why
    # A decode rank
    HISTORY_POSTED = "history posted"  # POSTED, of the history's own transfer
    # A prefill rank
    REGISTERED = "registered"  # the registration is known there
    COMPLETED = "completed"  # the completion is
    POSTING = "posting"  # the note is what that waited for, if for anything
    POSTED = "posted"
    WRITTEN = "written"  # the note is the number of bytes
    # A decode engine's scheduler
    DECODE_ARRIVED = "decode arrived"
    DEFERRED = "deferred"  # its blocks are not taken yet; the note is the setting of ``registration``
    REGISTERING = "registering"  # blocks are taken, the registration goes out; the note is the tokens cached, if any
    GIVEN_UP = "given up"  # the note says why
    LOCAL = "local"  # it computes the prompt itself; the note says why
    RECEIVED = "received"  # vLLM has taken the receive as finished
    RESUMED = "resumed"  # the first step with it is scheduled
    TOKEN = "token"  # that step has given its first token
    # A decode rank
    LANDED = "landed"  # every WRITE for it is in memory


OF_ROUTER = frozenset({MarkName.ARRIVED, MarkName.SENT, MarkName.ENGINE_LOST, MarkName.FIRST_TOKEN, MarkName.ENDED})
OF_ENGINES = frozenset(MarkName) - OF_ROUTER


class StageName(StrEnum):
    """Of a path, in the order in which they come."""

    ROUTE = "route"
    PREFILL_QUEUE = "prefill.queue"
    HISTORY_ASK = "history.ask"
    HISTORY_MATCH = "history.match"
    HISTORY_WRITE = "history.write"
    PREFILL_COMPUTE = "prefill.compute"
    MATCH_WAIT = "match.wait"
    WRITE_QUEUE = "write.queue"
    WRITE_POST = "write.post"
    WRITE_TRANSFER = "write.transfer"
    DECODE_RESUME = "decode.resume"
    LOST = "lost"
    DECODE_QUEUE = "decode.queue"
    DECODE_COMPUTE = "decode.compute"
    FIRST_TOKEN = "decode.first_token"


HISTORY_STAGES = (StageName.HISTORY_ASK, StageName.HISTORY_MATCH, StageName.HISTORY_WRITE)
"""They come between two waits in prefill's queue, where prefill asked a decode engine for the prompt's beginning."""


class Outcome(StrEnum):
    """How the prompt's KV came to the decode engine."""

    PUSHED = "pushed"
    RECOMPUTED = "recomputed"  # decode computed the prompt after a receive had failed
    LOCAL = "computed locally"  # decode computed the prompt without asking for it
    ALONE = "alone"  # nobody else was meant to
    FAILED = "failed"  # there was no first token
    UNKNOWN = "unknown"  # the engines' marks did not arrive


class HistoryOutcome(StrEnum):
    """What became of the KV that a decode engine had of the prompt."""

    RECEIVED = "received"
    DECLINED = "declined"  # it was asked for, and not taken
    FAILED = "failed"  # it was taken, and did not come
    NOT_ASKED = "not asked"
    UNKNOWN = "unknown"  # the marks did not arrive


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
class History:
    """What a decode engine had of the prompt.

    Attributes:
        engine: the decode engine.
        tokens: how many came.
        missed_tokens: how many it had that prefill computed.
        computed_tokens: how many prefill computed in all; 0 if that is not known.
        reason: of an outcome that is not RECEIVED; empty if prefill was told of no engine.
    """

    engine: str
    outcome: HistoryOutcome
    tokens: int = 0
    missed_tokens: int = 0
    computed_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Path:
    """A request's way to its first token. Times in ns.

    Attributes:
        stages: each starts :data:`GAP_NS` after its predecessor's end.
        end_ns: of the whole answer.
        reason: of an outcome that is not PUSHED.
        router_ns: until the router sent the legs.
        deferred: the setting of ``registration`` for which decode took blocks later than it could have, if it did.
        late_side: whom the match waited for, ``prefill`` or ``decode``; empty if there was none.
        late_by_ns: for how long the other side had to wait.
        registering, completing: the messages that the match joined, as they were sent.
        missing: stages whose marks did not arrive; their time is in the stage after them.
        history: None if no decode engine was asked for the prompt's beginning, or had more of it than prefill.
    """

    stages: tuple[Stage, ...]
    start_ns: int
    first_token_ns: int
    end_ns: int
    outcome: Outcome
    reason: str = ""
    router_ns: int = 0
    deferred: str = ""
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
    history: History | None = None

    @property
    def ttft_ns(self) -> int:
        return self.first_token_ns - self.start_ns
