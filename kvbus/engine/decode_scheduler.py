"""The decode engine's scheduler on the bus: performs what the registrar decides.

Called from two threads: the engine's (``why_not``, ``register``, ``received``, ``aborted``, ``poll``) and the node's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvbus.bus import Node
from kvbus.protocol import Change, PeerLeft, differences
from kvbus.protocol.decode import (
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Echo,
    Effect,
    Event,
    FirstToken,
    Publish,
    Rebound,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    Heartbeat,
    LeaseEcho,
    MetadataReply,
    MetadataRequest,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Rebind,
    RebindReply,
    Registration,
    RegistrationAck,
    Role,
    Subjects,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
)

logger = logging.getLogger(__name__)


def sources_of(own: Heartbeat) -> tuple[Role, ...]:
    """The roles whose heartbeats a scheduler needs: those of engines that may write into its own."""
    return tuple(each for each in Role if replace(own, role=each).may_write_into(own))


def pulses_for(own: Heartbeat, subjects: Subjects) -> list[Callable[[str], str]]:
    """The subjects of the pulses of engines that may write into this one."""
    forth, back = own.role.decodes, own.history and own.role.prefills
    return [*([subjects.pulses] if forth else []), *([subjects.history_pulses] if back else [])]


PREFILL = (PrefillProgress, PrefillCompleted, PrefillFailed)
OfPrefill = PrefillProgress | PrefillCompleted | PrefillFailed
# The bus's word of a transfer and its notification in memory arrive at about the same time: look again for so long.
NEWS_FRESH_S = 0.03


class SinkScheduler:
    """See the module's docstring.

    Args:
        heartbeat: this engine's own, to compare a prefill engine's with.
    """

    def __init__(self, node: Node, registrar: Registrar, engine: str, heartbeat: Heartbeat) -> None:
        self._node, self._registrar, self._own = node, registrar, heartbeat
        self._abandoned: deque[Abandon] = deque()
        self._prefill_watchers: list[Callable[[OfPrefill], None]] = []
        self._news = threading.Event()
        self._news_at = 0.0
        node.join(self)
        subjects = node.subjects
        if heartbeat.is_written:
            node.listen(subjects.acks(engine), (RegistrationAck, CancelAck, *PREFILL), self._hear_source)
            node.listen(
                subjects.transfers(engine), (TransferStarted, TransferDone, TransferFailed), self._hear_transfer
            )
            node.watch_heartbeats(self._hear_heartbeat)
            for pulses in pulses_for(heartbeat, subjects):
                node.listen(pulses("*"), Pulse, self._hear_pulse)
        node.watch_peers(self._on_peer)
        node.watch_bus(self._on_bus)

    # The engine's thread

    def why_not(self, hint: str) -> str:
        """Why a prompt's KV cannot come from outside now; empty if it can."""
        if not self._node.bus.connected:
            return "the bus is not connected"
        peers = [peer for peer in self._node.membership.peers() if peer.may_write_into(self._own)]
        if hint:
            peers = [peer for peer in peers if peer.engine == hint]
        kind = "prefill" if self._own.role.decodes else "decode"
        if not peers:
            return f"{kind} engine {hint} is not on the bus" if hint else f"no {kind} engine is on the bus"
        fitting = [differences(self._own, peer) for peer in peers]
        return "" if [] in fitting else f"{kind} engine {peers[0].engine} does not fit: {fitting[0][0]}"

    def is_busy(self, hint: str) -> bool:
        """Whether a prefill engine that may have a request is in a long step, and cannot announce the request now.

        See :mod:`kvbus.protocol.decode.patience`.
        """
        peers = self._node.membership.peers(prefill=True)
        return any(peer.is_in_long_step for peer in peers if hint in ("", peer.engine))

    @property
    def connected(self) -> bool:
        return self._node.bus.connected

    def watch_prefills(self, watcher: Callable[[OfPrefill], None]) -> None:
        """Call ``watcher`` with word of prefills that were asked for with ``Wanted``. Before the node is started."""
        self._prefill_watchers.append(watcher)

    def register(self, registration: Registration, hint: str) -> None:
        """Publish a registration at once.

        Raises:
            PayloadTooLargeError: it is not registered.
        """
        self._node.check_size(self._subject_of(registration, hint), registration)
        self._node.call(self._apply, Register(registration, hint))

    def received(self, request_id: str) -> None:
        self._node.call(self._apply, Received(request_id))

    def aborted(self, request_id: str) -> None:
        self._node.call(self._apply, Aborted(request_id))

    def first_token(self, request_id: str) -> None:
        """The first token is out, or the request is over."""
        self._node.call(self._apply, FirstToken(request_id))

    def rebound(self, request_id: str, attempt: int, engine: str) -> None:
        """The prefill of this request is given to another engine."""
        self._node.call(self._apply, Rebound(request_id, attempt, engine))

    def serve_rebind(self, rebind: Callable[[Rebind], str]) -> None:
        """Answer routers' :class:`Rebind` with what ``rebind`` says against it. Before the node is started."""

        def answer(_: str, asked: Rebind) -> RebindReply:
            refused = rebind(asked)
            self._node.counters.add("rebinds_refused" if refused else "rebinds")
            return RebindReply(asked.transfer_id, asked.attempt, refused)

        self._node.serve(self._node.subjects.rebind(self._own.engine), Rebind, answer)

    def unwanted(self, cancel: Cancel, hint: str) -> None:
        """Tell the prefill side that a transfer which was never registered is not wanted."""
        self._publish(cancel, hint)

    def want(self, wanted: Wanted, hint: str) -> None:
        """Ask the prefill side to keep what cannot be registered yet."""
        self._publish(wanted, hint)

    def poll(self) -> list[Abandon]:
        """Receives that were given up since the last call."""
        return [self._abandoned.popleft() for _ in range(len(self._abandoned))]

    def wait_for_news(self, timeout_s: float) -> None:
        """Return when a transfer has moved, or after ``timeout_s``; at once for a while after it has."""
        if time.monotonic() - self._news_at > NEWS_FRESH_S:
            self._news.clear()
            self._news.wait(timeout_s)

    # The node's thread

    def next_deadline(self) -> float | None:
        return self._registrar.next_deadline()

    def tick(self, now: float) -> None:
        self._perform(self._registrar.tick(now))

    def _apply(self, event: Event) -> None:
        self._perform(self._registrar.apply(event, time.monotonic()))

    def _hear_transfer(self, message: TransferStarted | TransferDone | TransferFailed) -> None:
        self._apply(message)
        self.tell()

    def _hear_source(self, message: RegistrationAck | CancelAck | OfPrefill) -> None:
        if isinstance(message, RegistrationAck | CancelAck):
            self._apply(message)
            return
        for watcher in self._prefill_watchers:
            watcher(message)

    def _hear_pulse(self, pulse: Pulse) -> None:
        """Of an engine that is there: nobody else's is remembered, so lies do not pile up."""
        peer = self._node.membership.get(pulse.source_engine)
        if peer is None or peer.incarnation != pulse.source_incarnation or pulse.rank >= peer.tp_size:
            self._node.counters.add("rejected: pulse of nobody")
        else:
            self._apply(pulse)

    def _hear_heartbeat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.may_write_into(self._own):
            self._apply(heartbeat)

    def _on_peer(self, change: Change) -> None:
        match change:
            case PeerLeft(engine, incarnation, _, _):
                self._apply(SourceLeft(engine, incarnation))
            case _:
                pass

    def _on_bus(self, connected: bool) -> None:
        self._apply(BusBack() if connected else BusLost())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(engine, message):
                    self._publish(message, engine)
                case Echo(engine, echoes, epoch):
                    echo = LeaseEcho(self._own.engine, self._own.incarnation, echoes, epoch)
                    self._node.publish(self._node.subjects.echoes(engine, self._own.engine), echo, to=engine)
                case Abandon(request_id, reason):
                    self._node.counters.add("receives_abandoned")
                    logger.warning("kvbus: no KV from outside for request %s: %s", request_id, reason)
                    self._abandoned.append(effect)
                    self.tell()
                case Reject(reason):
                    self._node.counters.add(f"rejected: {reason}")

    def tell(self) -> None:
        """End :meth:`wait_for_news`. Any thread."""
        self._news_at = time.monotonic()
        self._news.set()

    def _publish(self, message: Registration | Cancel | Delivered | Wanted, engine: str) -> None:
        """To one prefill engine, or to all of them if ``engine`` is empty."""
        self._node.publish(self._subject_of(message, engine), message, to=engine)

    def _subject_of(self, message: Registration | Cancel | Delivered | Wanted, engine: str) -> str:
        subjects, me = self._node.subjects, self._own.engine
        if isinstance(message, Cancel):
            return subjects.cancels(engine, me) if engine else subjects.cancels_pool(me)
        return subjects.registrations(engine, me) if engine else subjects.pool(me)


def serve_metadata(node: Node, own: Heartbeat, payloads: dict[int, bytes]) -> None:
    """Answer requests for the NIXL agent metadata of this engine's ranks. ``payloads`` may be filled later.

    With it an engine can write into this one's memory. So only engines on the bus that fit get it, encrypted for them.
    """

    def refuse(subject: str, why: str) -> MetadataReply | None:
        rank = _rank_in(subject)
        return None if rank is None else MetadataReply(own.engine, own.incarnation, rank, error=why)

    def answer(subject: str, request: MetadataRequest) -> MetadataReply | None:
        rank, peer = _rank_in(subject), node.membership.get(request.sender)
        if rank is None or request.incarnation not in (0, own.incarnation):
            return None  # while an engine restarts there may be two of its name
        if peer is None or not peer.may_write_into(own) or differences(own, peer):
            return refuse(subject, f"{request.sender} is no prefill engine on the bus that fits")
        payload = payloads.get(rank)
        if payload is None:
            return refuse(subject, f"rank {rank} is not ready, or does not exist")
        if node.keys is not None:
            payload = node.keys.encrypt(payload, request.speaker)
        return MetadataReply(own.engine, own.incarnation, rank, payload or b"")

    def stranger(subject: str) -> MetadataReply | None:
        node.ask_who()  # it may be an engine that has just come: known when it asks again
        return refuse(subject, "whoever asks is not known")

    node.serve(node.subjects.metadata(own.engine, "*"), MetadataRequest, answer, stranger)


def _rank_in(subject: str) -> int | None:
    rank = subject.split(".")[-2]
    return int(rank) if rank.isascii() and rank.isdigit() and len(rank) <= 6 else None
