"""One rank of an engine on the bus: performs what the matcher and the arrivals decide, on the transport.

It has no thread: :class:`kvbus.engine.writer.Writer` drives it in engines, the simulator drives it step by step.
The one rule: whoever drives it does so from one thread, since the fence's checks and the posting of a WRITE must not be
parted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.engine.items import Abandon, AddPeer, Expect, Greet, Item, Overheard, Told
from kvbus.engine.receives import Receives, poll_interval_s
from kvbus.engine.transport import Transport
from kvbus.engine.write_marks import WriteMarks
from kvbus.errors import PeerRefusedError, TransferRefusedError
from kvbus.metrics import Counters
from kvbus.protocol import MAX_WRITE_S
from kvbus.protocol.decode import Arrived, Landed
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
from kvbus.trace import Marking
from kvbus.wire import Message, TransferDone, TransferFailed, TransferStarted

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 256


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
        calm_pulse_interval_s: likewise while it has no transfer, or has had some for less than ``pulse_interval_s``;
            None: as often.
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
        calm_pulse_interval_s: float | None = None,
        first_pulse_at: float = 0.0,
        max_write_s: float = MAX_WRITE_S,
    ) -> None:
        self._matcher, self._transport, self._rank, self._ranks = matcher, transport, rank, ranks
        self._publish, self._introduce, self._clock = publish, introduce, clock
        self._counters, self._marks = counters, WriteMarks(marking)
        self._pulse_interval_s, self._max_write_s = pulse_interval_s, max_write_s
        self._calm_pulse_interval_s = calm_pulse_interval_s or pulse_interval_s
        self._pulsed_at, self._first_pulse_at = float("-inf"), first_pulse_at
        self._busy_since: float | None = None
        self._receives = Receives(transport, counters, marking, max_write_s)
        # Decode engines, by id: their tensor parallel size; those that left, those that were disconnected for an
        # overdue WRITE, and those to be met anew, each until no WRITE into them is outstanding.
        self._sink_tp_size: dict[str, int] = {}
        self._left: set[str] = set()
        self._overdue: set[str] = set()
        self._to_meet: set[str] = set()
        self._writes: dict[tuple[str, int], tuple[WriteJob, float]] = {}
        self._told = 0
        self._released: deque[str] = deque()

    def report(self) -> RankReport:
        """What happened since the last call. Thread-safe."""
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        return RankReport(released, self._receives.take_arrived())

    @property
    def writing(self) -> int:
        """How many jobs have WRITEs outstanding."""
        return len(self._writes)

    @property
    def transfers(self) -> int:
        """How many transfers the matcher knows of."""
        return len(self._matcher)

    @property
    def receiving(self) -> int:
        """How many receives are expected and not reported."""
        return len(self._receives)

    def handle(self, item: Item, came_at: float | None = None) -> None:
        """Take one item from the bus or from the engine.

        Args:
            came_at: when it came to this process, if it had to wait for whoever drives this; for traces only.
        """
        now = self._clock()
        if came_at is not None:
            self._marks.taken_up(item, came_at, now)
        match item:
            case AddPeer():
                self._add_peer(item, now)
            case SinkLeft():
                self._apply(item, now)
                self._left.add(item.engine)
                self._drop_left()
            case Expect(request_id, attempt, traced):
                self._receives.expect(request_id, attempt, traced, now)
            case Abandon(request_id):
                self._receives.abandon(request_id, now)
            case Greet():
                self._receives.greet(now)
            case TransferStarted() | TransferDone() | TransferFailed():
                self._receives.hear(item, now)
            case Told(number):
                self._told = number
            case Overheard(word) if word.number <= self._told:  # late, or said again by somebody
                self._counters.add("rejected: known from the step plan")
            case Overheard(word):
                self._apply(word, now)
            case _:
                self._apply(item, now)

    def poll(self) -> float | None:
        """Drive what is outstanding; returns in how many seconds to call again, None: only when there is an item."""
        now = self._clock()
        if (deadline := self._matcher.next_deadline()) is not None and deadline <= now:
            self._perform(self._matcher.tick(now))
        if (pulse_at := self._next_pulse(now)) is not None and now >= pulse_at:
            self._pulsed_at = now
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
        self._receives.poll(now)
        return self._next_poll_s()

    def close(self) -> None:
        self._transport.close()

    def _apply(self, event: Event, now: float) -> None:
        self._perform(self._matcher.apply(event, now))

    def _drop_overdue(self, now: float) -> None:
        """Rule F3: no WRITE runs longer than ``max_write_s``; the peer is disconnected instead, and met anew."""
        for job, posted in list(self._writes.values()):
            if now - posted > self._max_write_s and job.sink_engine not in self._overdue:
                self._counters.add("writes_overdue")
                logger.error(
                    "kvbus: a WRITE into engine %s has run for %.1f s; disconnecting from it",
                    job.sink_engine,
                    now - posted,
                )
                self._overdue.add(job.sink_engine)
                self._to_meet.add(job.sink_engine)
                self._sink_tp_size.pop(job.sink_engine, None)
                self._transport.drop_peer(job.sink_engine)
                self._apply(SinkLeft(job.sink_engine, job.sink_incarnation), now)

    def _next_pulse(self, now: float) -> float | None:
        """When the next pulse is due. All decode engines hear each, so there are fewer while no transfer takes long."""
        if self._pulse_interval_s is None or self._calm_pulse_interval_s is None:
            return None
        at = self._pulsed_at + self._calm_pulse_interval_s
        if not self.transfers:
            self._busy_since = None
        else:
            self._busy_since = now if self._busy_since is None else self._busy_since
            at = min(at, max(self._pulsed_at, self._busy_since) + self._pulse_interval_s)
        return max(at, self._first_pulse_at)

    def _next_poll_s(self) -> float | None:
        now = self._clock()
        waits = [self._receives.next_poll_s(now)]
        if (pulse_at := self._next_pulse(now)) is not None:
            waits.append(max(pulse_at - now, 0.0))
        if self._writes:
            waits.append(poll_interval_s(now - max(posted for _, posted in self._writes.values())))
        if (deadline := self._matcher.next_deadline()) is not None:
            waits.append(max(deadline - now, 0.0))
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

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
        writers = max(1, self._ranks // self._sink_tp_size.get(job.sink_engine, 1))
        notification = Landed(job.sink_request, job.attempt, self._rank, writers, job.first_token).encode()
        started = self._clock()
        try:
            self._transport.post(job, notification)
        except TransferRefusedError as error:
            logger.warning("kvbus: the WRITE of transfer %s cannot be posted: %s", job.transfer_id, error)
            failure = str(error)[:MAX_REASON_CHARS]
            self._apply(WriteEnded(job.transfer_id, job.attempt, failure=failure), self._clock())
            return
        self._writes[job.transfer_id, job.attempt] = (job, started)
        self._marks.posted(job, started, self._clock())

    def _end_write(self, ended: WriteEnded) -> None:
        job, _ = self._writes.pop((ended.transfer_id, ended.attempt))
        now = self._clock()
        if not ended.failure:
            self._marks.written(job, ended.nbytes, now)
        self._apply(ended, now)

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
            self._apply(SinkRefused(peer.engine, peer.incarnation, error.reason[:MAX_REASON_CHARS]), now)
            return
        self._sink_tp_size[peer.engine] = peer.tp_size
        self._receives.greet(now)
        self._left.discard(peer.engine)
        logger.info("kvbus: decode engine %s can be written to (%d blocks)", peer.engine, num_blocks)
        self._apply(SinkJoined(peer.engine, peer.incarnation, num_blocks), now)

    def _writes_into(self, engine: str) -> bool:
        return any(job.sink_engine == engine for job, _ in self._writes.values())

    def _drop_left(self) -> None:
        """Forget peers that left, once no WRITE into them is outstanding."""
        for engine in list(self._left):
            if not self._writes_into(engine):
                self._left.discard(engine)
                self._sink_tp_size.pop(engine, None)
                self._transport.drop_peer(engine)
