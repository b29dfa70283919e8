"""The node: one asyncio loop in one background thread per process, with the bus, the membership and the presence.

The one rule: whoever takes part in the protocol here is touched by the loop's thread only; other threads come in by
:meth:`Node.call`. After whatever happens, the one timer is armed anew for the earliest deadline of all participants.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from kvbus.bus.keys import Keys
from kvbus.bus.port import Bus
from kvbus.bus.presence import DISCONNECTS, lost_engine
from kvbus.errors import KVBusError, MessageError, PayloadTooLargeError
from kvbus.metrics import Counters, OncePer
from kvbus.protocol import Change, Membership, PeerJoined, PeerLeft
from kvbus.wire import Bye, Heartbeat, Message, Role, Subjects, Who, check_token, decode, encode, heard

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 3.0
# After a server's restart every node asks who is there: one answer in so long is for all who asked meanwhile.
ANSWER_EVERY_S = 0.1


class Participant(Protocol):
    """A state machine's shell that lives in the node's loop."""

    def next_deadline(self) -> float | None: ...

    def tick(self, now: float) -> None: ...


class Node:
    """See the module's docstring.

    Args:
        bus: entered and left by the node.
        subjects: of the namespace.
        name: of the thread, and in log lines.
        membership: told of every heartbeat.
        heartbeat_interval_s: how often :meth:`present` announces, seconds.
        hears: the roles whose heartbeats are heard; in a large pool every other one is cost without use.
        keys: of an engine; a router or tool has none. With them, what engines say to each other is sealed and checked.
        speaker: who speaks: an engine's id; otherwise ``name``.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        *,
        name: str,
        membership: Membership,
        heartbeat_interval_s: float = 0.5,
        hears: Collection[Role] = tuple(Role),
        keys: Keys | None = None,
        speaker: str = "",
    ) -> None:
        self.keys, self.me = keys, check_token("speaker", speaker or name)
        self.bus, self.subjects, self.name, self.membership = bus, subjects, name, membership
        self.counters: Counters = bus.counters
        self._interval_s = heartbeat_interval_s
        self.hears = frozenset(hears)
        self._participants: list[Participant] = []
        self._peer_watchers: list[Callable[[Change], None]] = []
        self._heartbeat_watchers: list[Callable[[Heartbeat], None]] = []
        self._bus_watchers: list[Callable[[bool], None]] = []
        self._heartbeat: Callable[[int], Heartbeat | None] | None = None
        self._number = 0
        self._announced_at = float("-inf")
        self._answer: asyncio.TimerHandle | None = None
        self._once = OncePer()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._setup: list[Callable[[], Any]] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # Set-up, before start()

    def join(self, participant: Participant) -> None:
        """Let ``participant`` share the node's timer."""
        self._participants.append(participant)

    def listen(
        self,
        subject: str,
        kinds: type[Message] | tuple[type[Message], ...],
        handler: Callable[[Any], None],
        *,
        sealed: bool = True,
    ) -> None:
        """Call ``handler`` with each message of ``kinds`` on ``subject``; everything else is counted and dropped.

        Args:
            sealed: False if a lie on this subject can do no harm: then nobody has to prove who speaks.
        """

        def on_payload(actual_subject: str, payload: bytes) -> None:
            message = self._hear_message(actual_subject, payload, sealed=sealed)
            if message is None:
                return
            if not isinstance(message, kinds):
                self._complain(actual_subject, f"{message.KIND} is not spoken on this subject")
                return
            try:
                handler(message)
            finally:
                self._arm()

        self._setup.append(lambda: self.bus.subscribe(subject, on_payload))

    def serve(
        self,
        subject: str,
        kind: type[M],
        handler: Callable[[str, M], Message | None],
        stranger: Callable[[str], Message | None] = lambda _: None,
    ) -> None:
        """Answer requests of ``kind`` on ``subject``; ``handler`` gets the subject and the request.

        Args:
            stranger: gets the subject, and gives the answer for who did not prove who asks.
        """

        def on_request(actual_subject: str, payload: bytes) -> bytes | None:
            message = self._hear_message(actual_subject, payload, sealed=True)
            if message is not None and not isinstance(message, kind):
                return None
            answer = handler(actual_subject, message) if message is not None else stranger(actual_subject)
            return encode(answer) if answer is not None else None

        self._setup.append(lambda: self.bus.serve(subject, on_request))

    def present(self, heartbeat: Callable[[int], Heartbeat | None]) -> None:
        """Announce this engine: ``heartbeat(number)`` builds the next one, None while there is nothing to say."""
        self._heartbeat = heartbeat

    def watch_heartbeats(self, watcher: Callable[[Heartbeat], None]) -> None:
        """Call ``watcher`` with every heartbeat, after the membership has heard it."""
        self._heartbeat_watchers.append(watcher)

    def watch_peers(self, watcher: Callable[[Change], None]) -> None:
        self._peer_watchers.append(watcher)

    def watch_bus(self, watcher: Callable[[bool], None]) -> None:
        self._bus_watchers.append(watcher)

    # Any thread

    def start(self) -> None:
        """Run in a thread of its own; returns when it does. It does not wait for a NATS server."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise KVBusError(f"kvbus: {self.name} did not start within {START_TIMEOUT_S} s")

    def close(self) -> None:
        """Say goodbye and end the thread; idempotent, bounded in time."""
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("kvbus: %s did not end within %s s; left behind", self.name, CLOSE_TIMEOUT_S)

    def publish(self, subject: str, message: Message, to: str = "") -> bool:
        """Publish from any thread; False, and counted, if the bus is away.

        Args:
            to: the engine that shall be able to check that it is from us; our own one for its other processes.

        Raises:
            PayloadTooLargeError: nothing was sent.
        """
        if not to or self.keys is None:
            return self.bus.publish(subject, encode(message))
        keys = self._keys_of(to)
        if not keys:
            self.counters.add("rejected: no key to seal with")
        sent = [self.bus.publish(subject, encode(message, key)) for key in keys]
        return bool(sent) and all(sent)

    def _keys_of(self, engine: str) -> list[bytes]:
        assert self.keys is not None
        member = self.membership.get(engine)
        return self.keys.towards(engine, member.incarnation if member is not None else None)

    def check_size(self, subject: str, message: Message) -> None:
        """Raise PayloadTooLargeError if the server would not take ``message``."""
        size = len(encode(message, bytes(1)))
        if size > self.bus.max_payload:
            raise PayloadTooLargeError(subject, size, self.bus.max_payload)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` in the loop's thread soon, then arm the timer. Dropped if the node has ended."""

        def run() -> None:
            try:
                function(*args)
            except Exception:
                self.counters.add("callback_errors")
                logger.exception("kvbus: a call into %s failed", self.name)
            self._arm()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closing
                self._loop.call_soon_threadsafe(run)

    # The loop's thread

    def spawn(self, coroutine: Any, name: str) -> None:
        """Run a coroutine of ours in the background; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def ask_who(self) -> None:
        """Ask every engine for a heartbeat."""
        self.publish(self.subjects.who(self.me), Who(self.me))

    async def request(self, subject: str, message: Message, timeout_s: float, to: str = "") -> Message:
        """Ask on ``subject``; ``to`` as in :meth:`publish`.

        Raises:
            BusUnavailableError: no answer.
            MessageError: the answer cannot be read.
        """
        key = self._keys_of(to)[-1:] if to and self.keys is not None else []
        return decode(await self.bus.request(subject, encode(message, *key), timeout_s))

    async def __aenter__(self) -> Self:
        """Run in the current event loop instead of a thread."""
        self._loop = asyncio.get_running_loop()
        roles = ["*"] if self.hears == frozenset(Role) else sorted(self.hears)
        for role in roles:
            self.listen(self.subjects.heartbeats(role, "*"), Heartbeat, self._hear)
        if roles:
            self.listen(self.subjects.bye("*"), Bye, self._hear)
        self.listen(self.subjects.who(), Who, lambda _: self._answer_who())
        await self.bus.subscribe(DISCONNECTS, self._on_disconnect)
        self.bus.watch(self._on_bus)
        for setup in self._setup:
            await setup()
        await self.bus.__aenter__()
        self.spawn(self._beat(), f"{self.name}-heartbeat")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._say_goodbye()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.bus.__aexit__(kind, error, tb)
        for timer in (self._timer, self._answer):
            if timer is not None:
                timer.cancel()

    def _run(self) -> None:
        async def main() -> None:
            self._stop = asyncio.Event()
            async with self:
                self._started.set()
                await self._stop.wait()

        try:
            asyncio.run(main())
        except Exception:
            self.counters.add("node_errors")
            logger.exception("kvbus: %s ended", self.name)

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(self._interval_s)

    def _answer_who(self) -> None:
        wait_s = self._announced_at + ANSWER_EVERY_S - time.monotonic()
        if wait_s <= 0:
            self.announce()
        elif self._answer is None and self._loop is not None:
            self._answer = self._loop.call_later(wait_s, self.announce)

    def announce(self) -> None:
        """Send a heartbeat now."""
        self._announced_at = time.monotonic()
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
        if self._heartbeat is None or not self.bus.connected:
            return
        self._number += 1
        heartbeat = self._heartbeat(self._number)
        if heartbeat is None:
            return
        subject = self.subjects.heartbeats(heartbeat.role, heartbeat.engine)
        try:
            self.publish(subject, heartbeat)
        except PayloadTooLargeError as error:
            if self._once.due(subject):
                logger.error("%s: this engine cannot be seen", error)

    def _say_goodbye(self) -> None:
        heartbeat = self._heartbeat(self._number + 1) if self._heartbeat is not None else None
        if heartbeat is not None:
            bye = self.keys.bye() if self.keys is not None else Bye(heartbeat.engine, heartbeat.incarnation)
            self.publish(self.subjects.bye(heartbeat.engine), bye)

    def _hear(self, message: Heartbeat | Bye) -> None:
        now = time.monotonic()
        if isinstance(message, Bye):
            self._tell(self.membership.hear(message, now))
            return
        if self.keys is not None and not self.keys.may_be(message, now):
            self._complain(self.subjects.heartbeats(message.role, message.engine), "another public key than before")
            return
        changes = self.membership.hear(message, now)
        if self.membership.get(message.engine) is not message:
            self.counters.add("rejected: heartbeat of another")
            return
        if self.keys is not None:
            self.keys.learn(message, now)
        self._tell(changes)
        for watcher in self._heartbeat_watchers:
            watcher(message)

    def _on_disconnect(self, _: str, payload: bytes) -> None:
        lost = lost_engine(payload)
        if lost is not None:
            self.membership.suspect(*lost, time.monotonic())
            self._arm()

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case PeerJoined(heartbeat):
                    logger.info("kvbus: engine %s (%s) is there", heartbeat.engine, heartbeat.role)
                case PeerLeft(engine, _, role, reason):
                    logger.info("kvbus: engine %s (%s) is gone: %s", engine, role, reason)
            for watcher in self._peer_watchers:
                watcher(change)

    def _on_bus(self, connected: bool) -> None:
        now = time.monotonic()
        self.membership.excuse_silence(now)
        for watcher in self._bus_watchers:
            watcher(connected)
        if connected:
            if self.hears:
                self.ask_who()
            self.announce()
        self._arm()

    def _arm(self) -> None:
        """(Re-)arm the one timer. While the bus is away silence proves nothing, so the membership's rests.

        A deadline that has moved away leaves the timer as it is, since that is what nearly every message does: it comes
        too early, once, and is armed anew.
        """
        deadlines = [participant.next_deadline() for participant in self._participants]
        if self.bus.connected:
            deadlines.append(self.membership.next_deadline())
        earliest = min((at for at in deadlines if at is not None), default=None)
        if earliest is None or self._loop is None or (self._timer is not None and self._timer_at <= earliest):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = earliest
        self._timer = self._loop.call_later(max(0.0, earliest - time.monotonic()), self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._timer = None
        try:
            if self.bus.connected:
                self._tell(self.membership.tick(now))
            for participant in self._participants:
                participant.tick(now)
        except Exception:
            self.counters.add("callback_errors")
            logger.exception("kvbus: a timer of %s failed", self.name)
        self._arm()

    def _hear_message(self, subject: str, payload: bytes, *, sealed: bool) -> Message | None:
        try:
            message = heard(subject, payload)
        except MessageError as error:
            self._complain(subject, str(error))
            return None
        if sealed and message.SEALED and self.keys is not None and not self.keys.believes(message, payload):
            if not self.keys.know(message.speaker):
                self.counters.add("rejected: speaker not known yet")  # its heartbeat is on the way, or a lie
                return None
            self.counters.add("rejected: not sealed by its speaker")
            if self._once.due(f"seal {subject}"):
                logger.warning("kvbus: dropped %s on %s: %s did not seal it", message.KIND, subject, message.speaker[0])
            return None
        return message

    def _complain(self, subject: str, reason: str) -> None:
        self.counters.add("rejected_messages")
        if self._once.due(subject):
            logger.warning("kvbus: dropped a message on %s: %.300s (logged once a minute)", subject, reason)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counters.add("task_errors")
            logger.error("kvbus: %s failed: %s", task.get_name(), error, exc_info=error)
