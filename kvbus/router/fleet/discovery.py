"""Asks engines in the background for the names under which they serve, so that requests need not.

Each engine is asked when it becomes ready, and again every :data:`EVERY_S`. Before the router calls a name unknown, it
asks all of them at once with the client's own key: an adapter may have been loaded a second ago. It does the same for a
name that a prefill engine is not known to serve, if that engine tells its names to clients only. Clients with the same
key share such a round, and there is at most one every :data:`GAP_S`. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import aiohttp

from kvbus.protocol import Change, Membership, PeerLeft
from kvbus.router.fleet.models import ModelNames, read_list
from kvbus.router.fleet.policy import Key, is_usable, key_of
from kvbus.router.http import Answer, returned, upstream
from kvbus.wire import Heartbeat

EVERY_S = 10.0
STALE_S = 1.5 * EVERY_S
GAP_S = 0.25
ANSWER_S = 2.0
ROUND_S = 3.0  # how long a client waits for one, also if engines are frozen
AT_ONCE = 16
MAX_LIST_BYTES = 1 << 20
MAX_ROUNDS = 8  # that wait for their turn; clients with further keys get an answer from what is known
KEY_HEADERS = ("authorization", "x-api-key")


class ModelDiscovery:
    """See the module's docstring.

    Args:
        key: of engines with ``--api-key``; empty if the operator gave none. Then the router learns their names when
            clients ask.
    """

    def __init__(self, membership: Membership, names: ModelNames, key: str = "") -> None:
        self._membership, self._names = membership, names
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._asked: set[Key] = set()
        self._locked: set[Key] = set()  # engines that refuse the operator's key
        self._told_at: dict[Key, float] = {}  # when each told its names, or refused to tell them to a client
        self._wake = asyncio.Event()
        self._rounds: dict[str, asyncio.Task[Answer | None]] = {}
        self._running: set[asyncio.Task[Answer | None]] = set()
        self._next_at = 0.0

    def keys_checked(self, engines: Sequence[Heartbeat]) -> bool:
        """Whether all of these engines check API keys, as far as is known."""
        return bool(self._headers) or all(key_of(engine) in self._locked for engine in engines)

    @contextlib.asynccontextmanager
    async def asking(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Ask in the background while this is entered."""
        self._session, self._slots = session, asyncio.Semaphore(AT_ONCE)
        background = asyncio.create_task(self._ask_for_ever(), name="router-names")
        try:
            yield
        finally:
            tasks = [background, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def on_peer(self, change: Change) -> None:
        """Called for each change of the membership."""
        if isinstance(change, PeerLeft):
            key = (change.engine, change.incarnation)
            self._names.forget(*key)
            self._asked.discard(key)
            self._locked.discard(key)
            self._told_at.pop(key, None)
        elif is_usable(change.heartbeat) and key_of(change.heartbeat) not in self._asked:
            self._wake.set()

    async def ask_now(self, headers: Mapping[str, str]) -> Answer | None:
        """Ask all engines with the key among a client's headers. If all refuse that key, returns what one answered."""
        keys = {name: value for name, value in headers.items() if name.lower() in KEY_HEADERS}
        shared_by = repr(sorted(keys.items()))
        ongoing = self._rounds.get(shared_by)
        if ongoing is None:
            if len(self._rounds) >= MAX_ROUNDS:
                return None
            ongoing = asyncio.create_task(self._round(shared_by, keys), name="router-names-now")
            self._rounds[shared_by] = ongoing
            self._running.add(ongoing)
            ongoing.add_done_callback(self._running.discard)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUND_S):
                return await asyncio.shield(ongoing)
        return None

    def is_stale(self, engines: Sequence[Heartbeat]) -> bool:
        """Whether one of these engines may have names that are not known."""
        since = asyncio.get_running_loop().time() - STALE_S
        return any(self._told_at.get(key_of(engine), since) <= since for engine in engines)

    async def ask(self, engines: Sequence[Heartbeat], headers: Mapping[str, str]) -> list[Answer]:
        """The answers of these engines to ``/v1/models``, of those that answer in time. Their names are learned."""
        answers = await asyncio.gather(*(self._ask_one(engine, headers) for engine in engines))
        return [answer for answer in answers if answer is not None]

    async def _round(self, shared_by: str, keys: Mapping[str, str]) -> Answer | None:
        now = asyncio.get_running_loop().time()
        starts_at = self._next_at = max(now, self._next_at + GAP_S)
        try:
            await asyncio.sleep(starts_at - now)
        finally:
            del self._rounds[shared_by]  # later clients need another round: engines may have answered already
        answers = await self.ask(self._usable(), keys)
        return answers[0] if answers and all(answer.status in (401, 403) for answer in answers) else None

    async def _ask_for_ever(self) -> None:
        while True:
            everybody = self._usable()
            await self.ask([engine for engine in everybody if key_of(engine) not in self._locked], self._headers)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    while True:
                        await self._wake.wait()
                        self._wake.clear()
                        new = [engine for engine in self._usable() if key_of(engine) not in self._asked]
                        await self.ask(new, self._headers)

    async def _ask_one(self, engine: Heartbeat, headers: Mapping[str, str]) -> Answer | None:
        key = key_of(engine)
        self._asked.add(key)
        answer, cards = await self._list_of(engine, headers), None
        if answer is not None and answer.status == 200:
            cards = read_list(answer.body)
        if cards is not None:
            adapters = (str(card["id"]) for card in cards if card.get("parent"))
            self._names.learn(engine, (str(card["id"]) for card in cards), adapters)
        if cards is not None or headers is not self._headers:
            self._told_at[key] = asyncio.get_running_loop().time()
        elif answer is not None and answer.status in (401, 403):
            self._locked.add(key)
        return answer

    async def _list_of(self, engine: Heartbeat, headers: Mapping[str, str]) -> Answer | None:
        try:
            async with (
                self._slots,
                asyncio.timeout(ANSWER_S),
                self._session.get(upstream.url_of(engine, "/v1/models"), headers=headers) as got,
            ):
                body = b""
                async for chunk in got.content.iter_any():
                    body += chunk
                    if len(body) > MAX_LIST_BYTES:
                        return None
                return Answer(got.status, body, returned(got.headers))
        except upstream.LOST:
            return None

    def _usable(self) -> list[Heartbeat]:
        return [engine for engine in self._membership.peers() if is_usable(engine)]
