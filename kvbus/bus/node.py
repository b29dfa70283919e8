"""The node: one asyncio loop in one background thread per process, with the bus, its peers and its heartbeats.

The one rule: only the loop's thread touches what takes part in the protocol here; other threads come in by
:meth:`Node.call`. After whatever happens, the one timer is armed anew for the earliest deadline of all participants.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Self, TypeVar

from kvbus.bus.announcer import Announcer
from kvbus.bus.keys import Keys
from kvbus.bus.peers import Peers
from kvbus.bus.port import Bus
from kvbus.bus.presence import DISCONNECTS
from kvbus.bus.seals import Seals
from kvbus.bus.timer import Participant, Timer
from kvbus.errors import KVBusError, PayloadTooLargeError
from kvbus.metrics import Counters
from kvbus.protocol import Change, Membership
from kvbus.wire import Bye, Heartbeat, Message, Role, Subjects, Who, check_token, decode, encode

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 3.0


class Node:
    """See the module's docstring.

    Args:
        bus: entered and left by the node.
        subjects: of the namespace.
        name: of the thread, and in log lines.
        membership: told of every heartbeat.
        heartbeat_interval_s: how often :meth:`present` announces, seconds.
        to_all_interval_s: how often at least in a way that other engines hear, too.
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
        to_all_interval_s: float = 0.0,
        hears: Collection[Role] = tuple(Role),
        keys: Keys | None = None,
        speaker: str = "",
    ) -> None:
        self.keys, self.me = keys, check_token("speaker", speaker or name)
        self.bus, self.subjects, self.name, self.membership = bus, subjects, name, membership
        self.counters: Counters = bus.counters
        self._intervals_s = (heartbeat_interval_s, max(heartbeat_interval_s, to_all_interval_s))
        self.hears = frozenset(hears)
        self._seals = Seals(keys, membership, self.counters)
        self._announcer = Announcer(bus, subjects, keys)
        self._peers = Peers(membership, keys, self._seals, subjects, bus)
        self._timer = Timer(name, self.counters)
        self._timer.participants.append(self._peers)
        self._bus_watchers: list[Callable[[bool], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._setup: list[Callable[[], Any]] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # Set-up, before start()

    def join(self, participant: Participant) -> None:
        """Let ``participant`` share the node's timer."""
        self._timer.participants.append(participant)

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
            message = self._seals.read(actual_subject, payload, sealed=sealed)
            if message is None:
                return
            if not isinstance(message, kinds):
                self._seals.refuse(actual_subject, f"{message.KIND} is not spoken on this subject")
                return
            try:
                handler(message)
            finally:
                self._timer.arm()

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
            stranger: gets the subject, and gives the answer to a request whose sender did not prove who it is.
        """

        def on_request(actual_subject: str, payload: bytes) -> bytes | None:
            message = self._seals.read(actual_subject, payload, sealed=True)
            if message is not None and not isinstance(message, kind):
                return None
            answer = handler(actual_subject, message) if message is not None else stranger(actual_subject)
            return encode(answer) if answer is not None else None

        self._setup.append(lambda: self.bus.serve(subject, on_request))

    def present(self, heartbeat: Callable[[int], Heartbeat | None]) -> None:
        """Announce this engine: ``heartbeat(number)`` builds the next one, None while there is nothing to say."""
        self._announcer.heartbeat = heartbeat

    def watch_heartbeats(self, watcher: Callable[[Heartbeat], None]) -> None:
        """Call ``watcher`` with every heartbeat, after the membership has heard it."""
        self._peers.heartbeat_watchers.append(watcher)

    def watch_peers(self, watcher: Callable[[Change], None]) -> None:
        self._peers.watchers.append(watcher)

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
        payloads = self._seals.seal(message, to)
        if not payloads:
            self.counters.add("rejected: no key to seal with")
        sent = [self.bus.publish(subject, payload) for payload in payloads]
        return bool(sent) and all(sent)

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
                logger.exception("kvbus: a call into %s failed and is dropped", self.name)
            self._timer.arm()

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
        *_, payload = self._seals.seal(message, to) or [encode(message)]  # the newest incarnation's, if there are two
        return decode(await self.bus.request(subject, payload, timeout_s))

    def announce(self) -> None:
        """Send a heartbeat now."""
        self._announcer.announce()

    async def __aenter__(self) -> Self:
        """Run in the current event loop instead of a thread."""
        self._loop = asyncio.get_running_loop()
        roles = ["*"] if self.hears == frozenset(Role) else sorted(self.hears)
        for role in roles:
            self.listen(self.subjects.heartbeats(role, "*"), Heartbeat, self._peers.hear)
            if self.keys is None:  # a router or a tool
                self.listen(self.subjects.loads(role, "*"), Heartbeat, self._peers.hear)
        if roles:
            self.listen(self.subjects.bye("*"), Bye, self._peers.hear)
        self.listen(self.subjects.who(), Who, lambda _: self._announcer.answer_who())
        await self.bus.subscribe(DISCONNECTS, self._on_disconnect)
        self.bus.watch(self._on_bus)
        for setup in self._setup:
            await setup()
        await self.bus.__aenter__()
        self.spawn(self._announcer.run(*self._intervals_s), f"{self.name}-heartbeat")
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._announcer.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.bus.__aexit__(None, None, None)
        self._timer.cancel()

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
            logger.exception("kvbus: %s failed and has ended; this process is off the bus", self.name)

    def _on_disconnect(self, _: str, payload: bytes) -> None:
        self._peers.hear_disconnect(payload)
        self._timer.arm()

    def _on_bus(self, connected: bool) -> None:
        self.membership.excuse_silence(time.monotonic())
        for watcher in self._bus_watchers:
            watcher(connected)
        if connected:
            if self.hears:
                self.ask_who()
            self.announce()
        self._timer.arm()

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counters.add("task_errors")
            logger.error("kvbus: %s failed: %s", task.get_name(), error, exc_info=error)
