"""What an engine's prefix cache holds, as it is told to others: vLLM's events go in, numbered changes come out. Pure.

The one rule: the keys that were told, changes and all, are always the keys that are held here. vLLM may cache the same
block twice, and says so each time; it is gone when its last copy is.

Bounded by the number of blocks that the engine has: should vLLM's events not add up, the oldest are forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

from kvbus.bounded import BoundedDict
from kvbus.protocol.cache_keys import bytes_of, chain, pack, seed_of, unpack
from kvbus.wire import CACHE_KEY_BYTES, CachePage, CacheUpdate

MAX_KEPT = 4  # for as many routers that ask at once, page by page


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that follow each other have entered the cache.

    Args:
        names: vLLM's of each block; ``parent``: of the block before them, None at a prompt's beginning.
        token_ids: of all of them.
        salt: the client's; known at a prompt's beginning only.
    """

    names: Sequence[Hashable]
    parent: Hashable | None
    token_ids: Sequence[int]
    lora: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """A copy of each of these blocks has left the cache."""

    names: Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


CacheEvent = BlocksStored | BlocksRemoved | Cleared


@dataclass(slots=True)
class _Block:
    key: bytes
    copies: int


class CacheLog:
    """See the module's docstring. One thread at a time.

    Args:
        max_blocks: how many the engine has.
    """

    def __init__(self, engine: str, incarnation: int, model: str, block_size: int, max_blocks: int) -> None:
        self._engine, self._incarnation, self._max_blocks = engine, incarnation, max_blocks
        self._model, self.block_size = model, block_size
        self._blocks: dict[Hashable, _Block] = {}
        self._told: set[int] = set()
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._cleared = False
        self._check = 0
        self._kept: BoundedDict[int, tuple[int, bytes]] = BoundedDict(MAX_KEPT)
        self.number = 0
        self.unnamed = 0
        """Blocks that were left out: what decides about their KV is not known here."""

    def apply(self, event: CacheEvent) -> None:
        """vLLM's cache has changed."""
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved(names):
                for name in names:
                    self._remove(name)
            case Cleared():
                self._blocks.clear()
                self._stored.clear()
                self._removed.clear()
                self._cleared = True

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, max_keys: int) -> list[CacheUpdate]:
        """What has changed since the last call, at most ``max_keys`` in a message."""
        updates: list[CacheUpdate] = []
        cleared, removed, stored = self._cleared, list(self._removed), list(self._stored)
        self._cleared, self._removed, self._stored = False, set(), set()
        if cleared:
            self._told, self._check = set(), 0
        while cleared or removed or stored:
            gone, removed = removed[:max_keys], removed[max_keys:]
            room = max_keys - len(gone)
            new, stored = stored[:room], stored[room:]
            self._told.difference_update(gone)
            self._told.update(new)
            self._check = reduce(xor, new, reduce(xor, gone, self._check))
            self.number += 1
            check = pack([self._check])
            updates.append(
                CacheUpdate(self._engine, self._incarnation, self.number, check, pack(new), pack(gone), cleared)
            )
            cleared = False
        return updates

    def page(self, number: int, offset: int, max_keys: int) -> CachePage:
        """Some of all keys that were told: as of the update ``number`` if somebody asked for these lately, else as of
        now, from the first one."""
        if not number or number not in self._kept:
            number, offset = self.number, 0
            if number not in self._kept:
                self._kept[number] = (self._check, pack(list(self._told)))
        check, keys = self._kept[number]
        page = keys[offset * CACHE_KEY_BYTES : (offset + max_keys) * CACHE_KEY_BYTES]
        total = len(keys) // CACHE_KEY_BYTES
        return CachePage(self._engine, self._incarnation, number, pack([check]), total, offset, page)

    def _store(self, event: BlocksStored) -> None:
        if len(event.names) * self.block_size != len(event.token_ids):
            self.unnamed += len(event.names)  # of another KV group, or a part of a block
            return
        if event.parent is None:
            parent = seed_of(self._model, self.block_size, event.lora, event.salt)
        elif (before := self._blocks.get(event.parent)) is not None:
            parent = before.key
        else:
            self.unnamed += len(event.names)
            return
        keys = chain(parent, bytes_of(event.token_ids), self.block_size)
        for name, key in zip(event.names, keys, strict=True):
            block = self._blocks.get(name)
            if block is not None:
                block.copies += 1
                continue
            if len(self._blocks) >= self._max_blocks:
                self._forget(next(iter(self._blocks)))
            self._blocks[name] = _Block(key, 1)
            [number] = unpack(key)
            self._removed.discard(number)
            if number not in self._told or self._cleared:
                self._stored.add(number)

    def _remove(self, name: Hashable) -> None:
        block = self._blocks.get(name)
        if block is not None:
            block.copies -= 1
            if block.copies <= 0:
                self._forget(name)

    def _forget(self, name: Hashable) -> None:
        [number] = unpack(self._blocks.pop(name).key)
        self._stored.discard(number)
        if number in self._told and not self._cleared:
            self._removed.add(number)
