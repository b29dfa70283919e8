"""Which engine has which blocks in its prefix cache, as far as the engines have told. Pure; time is an argument.

The one rule: what is held of an engine is what it told up to one of its updates, the whole of it, or it is on the way
to be so again. A number that is missing, a heartbeat that knows of more, or a check that does not come out right, each
lets all of it be asked for anew, page by page. So what is lost, damaged or made up is wrong for about a second.

All of it is a hint: who follows it computes a prompt where it takes longer, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import reduce
from operator import xor

from kvbus.protocol.cache_keys import Prompt, unpack
from kvbus.wire import CachePage, CacheUpdate, Heartbeat

MAX_BLOCKS = 1 << 22
"""Of all engines together; each takes about 100 bytes."""
MAX_LATER_BYTES = 1 << 23
MIN_UPDATE_BYTES = 1 << 10
RETRY_S, LONGEST_S = 1.0, 30.0
CALM_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """This incarnation is gone, and its cache with it."""

    engine: str
    incarnation: int


CacheNews = Heartbeat | CacheUpdate | CachePage | EngineLeft


@dataclass(frozen=True, slots=True)
class AskCache:
    """Ask an engine for its keys; ``number`` and ``offset`` as in :class:`~kvbus.wire.cache_messages.CacheRequest`."""

    engine: str
    number: int = 0
    offset: int = 0


@dataclass(slots=True)
class _Cache:
    """What is known of one engine's cache.

    Attributes:
        number: of the update up to which ``keys`` is true; None: it has to be asked for.
        announced: what its last heartbeat said that the number was; ``seen``: what it was here then.
        pages: what has come of an answer, and the number that it is true for.
        later: updates that came since it was asked for.
    """

    heartbeat: Heartbeat
    keys: set[int] = field(default_factory=set)
    check: int = 0
    number: int | None = None
    announced: int = 0
    seen: int = 0
    pages: set[int] = field(default_factory=set)
    pages_number: int = 0
    offset: int = 0
    later: list[CacheUpdate] = field(default_factory=list)
    wait_s: float = RETRY_S
    asked_at: float = float("-inf")


class CacheIndex:
    """The table.

    Attributes:
        refused: updates and pages that were of no engine that is known, old, or too much.
        mended: how often an engine was asked for all of its keys anew.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._caches: dict[str, _Cache] = {}
        self.refused = self.mended = 0

    def apply(self, news: CacheNews, now: float) -> list[AskCache]:
        """An engine has said something, or has left."""
        if isinstance(news, Heartbeat):
            return self._heartbeat(news, now)
        cache = self._caches.get(news.engine)
        if cache is None or news.incarnation != cache.heartbeat.incarnation:
            self.refused += not isinstance(news, EngineLeft)
            return []
        match news:
            case CacheUpdate():
                return self._update(cache, news, now)
            case CachePage():
                return self._page(cache, news, now)
            case EngineLeft():
                del self._caches[news.engine]
                return []

    def held(self, prompt: Prompt) -> dict[str, int]:
        """How many tokens of the prompt each engine has, from its beginning on; engines that have none are left out.

        Raises:
            ValueError: its token ids are not integers of 32 bits.
        """
        found: dict[str, int] = {}
        caches = [(name, each) for name, each in self._caches.items() if each.heartbeat.model == prompt.model]
        for size in {cache.heartbeat.cache_block_size for _, cache in caches}:
            alive = [(name, cache.keys) for name, cache in caches if cache.heartbeat.cache_block_size == size]
            for keys in prompt.slices(size):
                leading = [(name, held, _leading(keys, held)) for name, held in alive]
                found.update((name, found.get(name, 0) + blocks * size) for name, _, blocks in leading if blocks)
                alive = [(name, held) for name, held, blocks in leading if blocks == len(keys)]
                if not alive:
                    break
        return found

    def knows(self, engine: str) -> bool:
        """Whether the engine says what is in its cache."""
        return engine in self._caches

    def blocks(self) -> dict[str, int]:
        """How many blocks each engine has, of those that say so."""
        return {name: len(cache.keys) for name, cache in self._caches.items()}

    def whole(self) -> bool:
        """Whether all that the engines told is known."""
        return all(cache.number is not None for cache in self._caches.values())

    def _heartbeat(self, heartbeat: Heartbeat, now: float) -> list[AskCache]:
        if not heartbeat.cache_block_size:
            self._caches.pop(heartbeat.engine, None)
            return []
        cache = self._caches.get(heartbeat.engine)
        if cache is None or cache.heartbeat.incarnation != heartbeat.incarnation:
            cache = self._caches[heartbeat.engine] = _Cache(heartbeat)
        # An update may be on its way, or have overtaken this heartbeat, but not the one before, too.
        if cache.number is not None and (cache.number < cache.announced or cache.seen > heartbeat.cache_number):
            self._lack(cache, now)
        cache.announced, cache.seen, cache.heartbeat = heartbeat.cache_number, cache.number or 0, heartbeat
        return self._ask(cache, now)

    def _update(self, cache: _Cache, update: CacheUpdate, now: float) -> list[AskCache]:
        if cache.number is None:
            if sum(map(_size, cache.later)) + _size(update) <= MAX_LATER_BYTES:
                cache.later.append(update)
            return self._ask(cache, now)
        if update.number <= cache.number:
            self.refused += 1
            return []
        if update.number != cache.number + 1 or not self._perform(cache, update):
            self._lack(cache, now)  # the answer will be true for this update, too
        return self._ask(cache, now)

    def _perform(self, cache: _Cache, update: CacheUpdate) -> bool:
        """Whether it came out as the engine says."""
        keys, check = (set(), 0) if update.cleared else (cache.keys, cache.check)
        gone = keys.intersection(unpack(update.removed))
        new = set(unpack(update.stored)) - keys
        if len(keys) - len(gone) + len(new) > self._room(cache):
            self.refused += 1
            cache.keys, cache.check = set(), 0  # to believe what is old would mislead for long
            return False
        keys -= gone
        keys |= new
        cache.keys, cache.check = keys, reduce(xor, new, reduce(xor, gone, check))
        cache.number = update.number
        return _is(cache.check, update.check)

    def _page(self, cache: _Cache, page: CachePage, now: float) -> list[AskCache]:
        if cache.number is not None or page.total > self._room(cache):
            self.refused += 1
            if cache.number is None:
                cache.keys, cache.check = set(), 0
            return []
        if page.number != cache.pages_number or page.offset == 0:
            cache.pages, cache.offset, cache.pages_number = set(), 0, page.number
        if page.offset != cache.offset:
            self.refused += 1
            return []
        keys = unpack(page.keys)
        cache.pages.update(keys)
        cache.offset += len(keys)
        if keys and cache.offset < page.total:
            cache.asked_at = now
            return [AskCache(page.engine, page.number, cache.offset)]
        check = reduce(xor, cache.pages, 0)
        pages, cache.pages = cache.pages, set()
        if len(pages) != page.total or not _is(check, page.check):
            return []  # and it is asked again when its time has come
        cache.keys, cache.check, cache.number = pages, check, page.number
        later, cache.later = sorted(cache.later, key=lambda each: each.number), []
        for update in later:  # what is missing among them the next update shows, or the next heartbeat
            if update.number == cache.number + 1 and not self._perform(cache, update):
                self._lack(cache, now)
                break
        return self._ask(cache, now)

    def _lack(self, cache: _Cache, now: float) -> None:
        """What is held is no longer true: until all of it has come anew, it is the best hint that there is."""
        self.mended += 1
        cache.number, cache.later = None, []
        cache.wait_s = RETRY_S if now - cache.asked_at > CALM_S else min(2 * cache.wait_s, LONGEST_S)

    def _ask(self, cache: _Cache, now: float) -> list[AskCache]:
        """Not more often than is useful: anybody can say what makes us ask."""
        if cache.number is not None or now - cache.asked_at < cache.wait_s:
            return []
        cache.asked_at, cache.later = now, []
        return [AskCache(cache.heartbeat.engine)]

    def _room(self, cache: _Cache) -> int:
        others = sum(map(len, (each.keys for each in self._caches.values()))) - len(cache.keys)
        return min(cache.heartbeat.total_blocks, self._max_blocks - others)


def _size(update: CacheUpdate) -> int:
    return len(update.stored) + len(update.removed) + MIN_UPDATE_BYTES


def _is(check: int, told: bytes) -> bool:
    return check == int.from_bytes(told, "little")


def _leading(keys: tuple[int, ...], held: set[int]) -> int:
    """How many of the keys, from the first on, are held. vLLM evicts a prompt from its end, so one that is held has all
    before it; to look at each of them would take 32 engines 4 ms for a prompt of 16,000 tokens."""
    if keys[-1] in held:
        return len(keys)
    return bisect_left(keys, True, key=lambda key: key not in held)
