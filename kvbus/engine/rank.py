"""One rank of an engine on the bus: performs what the matcher and the arrivals decide, on the transport.

It has no thread: :class:`kvbus.engine.writer.Writer` drives it in engines, the chaos harness drives it step by step.
The one rule: whoever drives it does so from one thread, since the fence's checks and the posting of a WRITE must not be
parted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbus.bounded import BoundedDict
from kvbus.engine.transport import Transport
from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.metrics import Counters
from kvbus.protocol import MAX_WRITE_S
from kvbus.protocol.decode import Arrivals, Arrived, Landed
from kvbus.protocol.prefill import (
    Effect,
    Event,
    Introduce,
    Matcher,
    PostWrite,
    Reject,
    ReleaseBlocks,
    Send,
    SinkJoined,
    SinkLeft,
    SinkRefused,
    WriteEnded,
    WriteJob,
)
from kvbus.trace import Marking, MarkName, Traced, traced
from kvbus.wire import (
    Message,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    TransferDone,
    TransferFailed,
    TransferStarted,
)

logger = logging.getLogger(__name__)

# Polling costs the engine's thread the GIL, so its interval grows with the age of what is waited for: a tenth of it.
MIN_POLL_S = 0.0002
MAX_POLL_S = 0.005
# Without word of a posted WRITE a notification is not expected; this finds it all the same if the word was lost.
QUIET_POLL_S = 0.05
# What was taken up so much later than it came is worth a word in a trace.
LAG_S = 0.01
MAX_LAGS = 1 << 10
WRITER_BUSY = "the rank's writer thread"
# The first contact of two needs both of them to progress; so both poll for a while.
GREETING_S = 2.0


@dataclass(frozen=True, slots=True)
class AddPeer:
    """A decode engine's metadata has come: make its memory writable."""

    engine: str
    incarnation: int
    tp_size: int
    metadata: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Expect:
    """The scheduler half has registered a receive."""

    request_id: str
    attempt: int
    traced: Traced | None = None


@dataclass(frozen=True, slots=True)
class Abandon:
    """The scheduler half has given a receive up, after the fence."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Greet:
    """A prefill engine has asked for this rank's metadata and is about to make contact."""


@dataclass(frozen=True, slots=True)
class Overheard:
    """What the bus says that the scheduler half has said; the step plan says it surely, and in order."""

    word: PrefillProgress | PrefillCompleted | PrefillFailed


@dataclass(frozen=True, slots=True)
class Told:
    """The step plan has said all that the scheduler half numbered up to here."""

    number: int


Item = Event | Overheard | Told | AddPeer | Expect | Abandon | Greet | TransferStarted | TransferDone | TransferFailed


@dataclass(frozen=True, slots=True)
class RankReport:
    """What vLLM is to be told: requests whose blocks this rank no longer reads, and receives that are over."""

    released: tuple[str, ...] = ()
    arrived: tuple[Arrived, ...] = ()


class Rank:
    """See the module's docstring.

    Args:
        publish: sends a message to the decode engine named; called from the driving thread.
        introduce: asks for the metadata of a decode engine that is not known yet; likewise.
        clock: monotonic seconds.
        pulse_interval_s: how often to send a pulse, seconds; None for a rank that writes nothing.
        first_pulse_at: not before this time of ``clock``: see :mod:`kvbus.protocol.lease`, 6.
        max_write_s: see :mod:`kvbus.protocol.lease`.
    """

    def __init__(
        self,
        *,
        matcher: Matcher,
        transport: Transport,
        rank: int,
        ranks: int,
        publish: Callable[[str, Message], None],
        introduce: Callable[[str], None],
        clock: Callable[[], float],
        counters: Counters,
        marking: Marking,
        pulse_interval_s: float | None = None,
        first_pulse_at: float = 0.0,
        max_write_s: float = MAX_WRITE_S,
    ) -> None:
        self._matcher, self._transport, self._rank, self._ranks = matcher, transport, rank, ranks
        self._publish, self._introduce, self._clock = publish, introduce, clock
        self._counters, self._marking = counters, marking
        self._pulse_interval_s, self._max_write_s = pulse_interval_s, max_write_s
        self._pulse_at = first_pulse_at
        self._overdue: set[str] = set()  # disconnected from, until their WRITEs have ended
        self._to_meet: set[str] = set()  # to be met anew then
        self._arrivals = Arrivals()
        self._peer_tp: dict[str, int] = {}
        self._leaving: dict[str, SinkLeft] = {}
        self._writes: dict[tuple[str, int], tuple[WriteJob, float]] = {}
        self._landing: dict[str, float] = {}
        self._traced: dict[str, tuple[Traced, int]] = {}
        self._greeting_until = 0.0
        self._told = 0
        self._lags: BoundedDict[tuple[MarkName, str, float], float] = BoundedDict(MAX_LAGS)
        self._released: deque[str] = deque()
        self._arrived: deque[Arrived] = deque()

    def report(self) -> RankReport:
        """What happened since the last call. Thread-safe."""
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        return RankReport(released, tuple(self._arrived.popleft() for _ in range(len(self._arrived))))

    @property
    def writing(self) -> int:
        """How many jobs have WRITEs outstanding."""
        return len(self._writes)

    @property
    def transfers(self) -> int:
        """How many transfers the matcher knows of."""
        return self._matcher.counts["transfers"]

    @property
    def receiving(self) -> int:
        """How many receives are expected and not reported."""
        return len(self._arrivals)

    def handle(self, item: Item, came_at: float | None = None) -> None:
        """Take one item from the bus or from the engine.

        Args:
            came_at: when it came to this process, if it had to wait for whoever drives this; for traces only.
        """
        now = self._clock()
        word = item.word if isinstance(item, Overheard) else item
        if came_at is not None and now - came_at > LAG_S and isinstance(word, Registration | PrefillCompleted):
            name = MarkName.REGISTERED if isinstance(word, Registration) else MarkName.COMPLETED
            self._lags[name, word.transfer_id, now] = came_at
        match item:
            case AddPeer():
                self._add_peer(item, now)
            case SinkLeft():
                self._perform(self._matcher.apply(item, now))
                self._leaving[item.engine] = item
                self._drop_left()
            case Expect(request_id, attempt, what):
                if what is not None:
                    self._traced[request_id] = (what, attempt)
                self._note(self._arrivals.expect(request_id, attempt))
            case Abandon(request_id):
                self._landing.pop(request_id, None)
                self._note(self._arrivals.abandon(request_id))
            case Overheard(word):
                if word.number <= self._told:
                    self._counters.add("rejected: known from the step plan")  # late, or said again by somebody
                else:
                    self._perform(self._matcher.apply(word, now))
            case Told(number):
                self._told = number
            case Greet():
                self._greeting_until = now + GREETING_S
            case TransferStarted() | TransferDone():
                self._landing.setdefault(item.request_id, now)
                if len(self._landing) > 2 * len(self._arrivals) + 64:
                    self._landing.pop(next(iter(self._landing)))
            case TransferFailed():
                self._landing.pop(item.request_id, None)
            case _:
                self._perform(self._matcher.apply(item, now))

    def poll(self) -> float | None:
        """Drive what is outstanding; returns in how many seconds to call again, None: only when there is an item."""
        now = self._clock()
        if (deadline := self._matcher.next_deadline()) is not None and deadline <= now:
            self._perform(self._matcher.tick(now))
        if self._pulse_interval_s is not None and now >= self._pulse_at:
            self._pulse_at = now + self._pulse_interval_s
            self._publish("", self._matcher.pulse(now))
        if self._writes:
            self._drop_overdue(now)
            for ended in self._transport.poll():
                self._end_write(ended)
            self._drop_left()
            for engine in [each for each in self._to_meet if not self._writes_into(each)]:
                self._to_meet.discard(engine)
                self._overdue.discard(engine)
                self._introduce(engine)
        self._forget_landing(now)
        if self._arrivals or self._landing or now < self._greeting_until:
            for text in self._transport.notifications():
                self._land(text)
        return self._next_poll()

    def close(self) -> None:
        self._transport.close()

    def _forget_landing(self, now: float) -> None:
        """Word of a WRITE can come after the WRITE itself, or be a lie: it counts for as long as a WRITE can run."""
        while self._landing:
            oldest = next(iter(self._landing))
            if now - self._landing[oldest] <= self._max_write_s:
                return
            del self._landing[oldest]

    def _drop_overdue(self, now: float) -> None:
        """Rule F3: no WRITE runs longer than ``max_write_s``; the peer is disconnected instead, and met anew."""
        for job, posted in list(self._writes.values()):
            if now - posted > self._max_write_s and job.sink_engine not in self._overdue:
                self._counters.add("writes_overdue")
                logger.error(
                    "kvbus: a WRITE into %s has run for %.1f s; disconnecting from it", job.sink_engine, now - posted
                )
                self._overdue.add(job.sink_engine)
                self._to_meet.add(job.sink_engine)
                self._peer_tp.pop(job.sink_engine, None)
                self._transport.drop_peer(job.sink_engine)
                self._perform(self._matcher.apply(SinkLeft(job.sink_engine, job.sink_incarnation), now))

    def _next_poll(self) -> float | None:
        now = self._clock()
        waits: list[float] = []
        if self._pulse_interval_s is not None:
            waits.append(max(self._pulse_at - now, 0.0))
        since = [posted for _, posted in self._writes.values()] + list(self._landing.values())
        if since:
            waits.append(min(max((now - max(since)) / 10, MIN_POLL_S), MAX_POLL_S))
        elif now < self._greeting_until:
            waits.append(MAX_POLL_S)
        elif self._arrivals:
            waits.append(QUIET_POLL_S)
        if (deadline := self._matcher.next_deadline()) is not None:
            waits.append(max(deadline - now, 0.0))
        return min(waits) if waits else None

    def _land(self, text: str) -> None:
        landed = Landed.decode(text)
        if landed is None:
            self._counters.add("rejected_notification")
            logger.warning("kvbus: dropped a notification that is not ours: %.200r", text)
            return
        arrived = self._arrivals.land(landed)
        self._note(arrived)
        if arrived:
            self._landing.pop(landed.request_id, None)

    def _note(self, arrived: list[Arrived]) -> None:
        self._arrived.extend(arrived)
        for each in arrived:
            what, attempt = self._traced.pop(each.request_id, (None, 0))
            if each.ok:
                self._marking.mark(what, MarkName.LANDED, attempt, at_s=self._clock())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(engine, message):
                    self._publish(engine, message)
                    if isinstance(message, TransferDone):
                        self._count_done(message)
                    elif isinstance(message, TransferFailed):
                        self._counters.add("transfers_failed")
                        logger.warning("kvbus: transfer %s failed: %s", message.transfer_id, message.reason)
                case PostWrite(job):
                    self._post(job)
                case ReleaseBlocks(request_id):
                    self._released.append(request_id)
                case Introduce(engine):
                    self._introduce(engine)
                case Reject(reason):
                    self._counters.add(f"rejected: {reason}")

    def _post(self, job: WriteJob) -> None:
        writers = max(1, self._ranks // self._peer_tp.get(job.sink_engine, 1))
        notification = Landed(job.sink_request, job.attempt, self._rank, writers).encode()
        started = self._clock()
        try:
            self._transport.post(job, notification)
        except TransferRefusedError as error:
            logger.warning("kvbus: transfer %s not posted: %s", job.transfer_id, error)
            self._perform(
                self._matcher.apply(WriteEnded(job.transfer_id, job.attempt, failure=str(error)[:256]), self._clock())
            )
            return
        self._writes[job.transfer_id, job.attempt] = (job, started)
        if (what := traced(job.transfer_id, job.traceparent)) is not None:
            known = [(MarkName.REGISTERED, job.registered_at), (MarkName.COMPLETED, job.completed_at)]
            came = [self._lags.pop((name, job.transfer_id, at), at) for name, at in known]
            for (name, _), at in zip(known, came, strict=True):
                self._marking.mark(what, name, job.attempt, at_s=at)
            note = job.held_up or (WRITER_BUSY if max(came) + LAG_S < max(at for _, at in known) else "")
            self._marking.mark(what, MarkName.POSTING, job.attempt, note, started)
            self._marking.mark(what, MarkName.POSTED, job.attempt, at_s=self._clock())

    def _end_write(self, ended: WriteEnded) -> None:
        job, _ = self._writes.pop((ended.transfer_id, ended.attempt))
        now = self._clock()
        if not ended.failure:
            what = traced(job.transfer_id, job.traceparent)
            self._marking.mark(what, MarkName.WRITTEN, job.attempt, str(ended.nbytes), now)
        self._perform(self._matcher.apply(ended, now))

    def _count_done(self, done: TransferDone) -> None:
        self._counters.add("transfers_done")
        self._counters.add("bytes_written", done.nbytes)
        self._counters.add(f"late_side_{done.late_side}")
        self._counters.observe(f"match_wait_{done.late_side}", done.match_wait_s)
        self._counters.observe("write", done.write_s)

    def _add_peer(self, peer: AddPeer, now: float) -> None:
        if self._writes_into(peer.engine):
            self._to_meet.add(peer.engine)  # its older incarnation's WRITEs must end first; then it is met anew
            return
        self._transport.drop_peer(peer.engine)
        try:
            num_blocks = self._transport.add_peer(peer.engine, peer.tp_size, peer.metadata)
        except PeerRefusedError as error:
            self._counters.add("peers_refused")
            logger.error("%s", error)
            refused = SinkRefused(peer.engine, peer.incarnation, error.reason[:256])
            self._perform(self._matcher.apply(refused, now))
            return
        self._peer_tp[peer.engine] = peer.tp_size
        self._greeting_until = now + GREETING_S
        self._leaving.pop(peer.engine, None)
        logger.info("kvbus: decode engine %s can be written to (%d blocks)", peer.engine, num_blocks)
        self._perform(self._matcher.apply(SinkJoined(peer.engine, peer.incarnation, num_blocks), now))

    def _writes_into(self, engine: str) -> bool:
        return any(job.sink_engine == engine for job, _ in self._writes.values())

    def _drop_left(self) -> None:
        """Forget peers that left, once no WRITE into them is outstanding."""
        for engine in list(self._leaving):
            if not self._writes_into(engine):
                del self._leaving[engine]
                self._peer_tp.pop(engine, None)
                self._transport.drop_peer(engine)
