"""Tells the bus what enters and leaves this engine's prefix cache, as vLLM's block pool says it (its KV events).

The one rule: EngineCore's thread only appends to a queue. A thread of its own makes keys of the blocks, gathers what
comes within :data:`GATHER_S`, and publishes it.

vLLM has publishers of its own, which ``--kv-events-config`` names, but allows ``zmq`` and none else there. So the pool
is told to make events, and they are taken where vLLM takes them; what the user has told vLLM stays as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from kvbus.bus import Node
from kvbus.protocol import BlocksRemoved, BlocksStored, CacheEvent, CacheLog, Cleared
from kvbus.wire import CACHE_KEY_BYTES, MAX_CACHE_KEYS, CachePage, CacheRequest, Heartbeat

logger = logging.getLogger(__name__)

GATHER_S = 0.05
CLOSE_S = 1.0
MAX_QUEUED = 1 << 12
"""Steps of vLLM. What comes later is lost, and so is what is known of the cache, so that nobody is misled."""
ENVELOPE_BYTES = 1024


class CacheEvents:
    """See the module's docstring.

    Args:
        own: this engine's heartbeat; what it says of its cache is in blocks of ``own.cache_block_size`` tokens.
        group: the KV group whose blocks are told.
    """

    def __init__(self, node: Node, own: Heartbeat, group: int) -> None:
        self._node, self._own, self._group = node, own, group
        self._subject = node.subjects.caches(own.engine)
        self._queue: SimpleQueue[Sequence[Any] | None] = SimpleQueue()
        self._log: CacheLog | None = None
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbus-cache", daemon=True)
        node.serve(node.subjects.whole_caches(own.engine), CacheRequest, self._answer)

    @property
    def number(self) -> int:
        """Of the last update."""
        return self._log.number if self._log is not None else 0

    def watch(self, pool: Any) -> None:
        """Take vLLM's events from its block pool from now on."""
        own = self._own
        self._log = CacheLog(own.engine, own.incarnation, own.model, own.cache_block_size, int(pool.num_gpu_blocks))
        theirs, theirs_are_on = pool.take_events, bool(pool.enable_kv_cache_events)

        def take_events() -> list[Any]:
            events: list[Any] = theirs()
            if events:
                self._take(events)
            return events if theirs_are_on else []

        pool.enable_kv_cache_events, pool.take_events = True, take_events
        self._thread.start()

    def close(self) -> None:
        """Idempotent, and bounded in time."""
        self._closed.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _take(self, events: list[Any]) -> None:
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(events)
        else:
            self._lost.set()

    def _run(self) -> None:
        while (events := self._queue.get()) is not None and not self._closed.wait(GATHER_S):
            steps = [events]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    return
                steps.append(more)
            try:
                self._tell(steps)
            except Exception:
                self._node.counters.add("callback_errors")
                self._lost.set()
                logger.exception("kvbus: what is in the prefix cache could not be told; it is told anew from now on")

    def _tell(self, steps: Sequence[Sequence[Any]]) -> None:
        log, counters = self._log, self._node.counters
        assert log is not None
        if self._lost.is_set():
            self._lost.clear()
            counters.add("cache: events lost")
            steps = ()
            with self._lock:
                log.apply(Cleared())
        for events in steps:
            with self._lock:
                for event in events:
                    if (change := read_event(event, self._group, log.block_size)) is not None:
                        log.apply(change)
        with self._lock:
            updates = log.take(self._max_keys)
        for update in updates:
            self._node.publish(self._subject, update)
            counters.add("cache: stored", len(update.stored) // CACHE_KEY_BYTES)
            counters.add("cache: removed", len(update.removed) // CACHE_KEY_BYTES)

    def _answer(self, _: str, request: CacheRequest) -> CachePage | None:
        if self._log is None:
            return None
        with self._lock:
            return self._log.page(request.number, request.offset, self._max_keys)

    @property
    def _max_keys(self) -> int:
        return max(1, min(MAX_CACHE_KEYS, (self._node.bus.max_payload - ENVELOPE_BYTES) // CACHE_KEY_BYTES))


def read_event(event: Any, group: int, block_size: int) -> CacheEvent | None:
    """What an event of vLLM's block pool says of this KV group, None for nothing.

    Of a chain of blocks, those from the first one on are left out whose KV depends on something that is no token, no
    LoRA adapter and no ``cache_salt``: pictures, sounds, embeddings.
    """
    kind = type(event).__name__
    if kind == "AllBlocksCleared":
        return Cleared()
    if event.group_idx not in (None, group):
        return None
    if kind == "BlockRemoved":
        return BlocksRemoved(event.block_hashes)
    lora, salt, known = event.lora_name or "", "", 0
    extra_keys = event.extra_keys or [None] * len(event.block_hashes)
    for number, extra in enumerate(extra_keys):
        words = list(extra or ())
        if lora and lora in words[:1]:
            del words[0]
        if number == 0 and event.parent_block_hash is None and len(words) == 1 and isinstance(words[0], str):
            salt = words.pop()
        if words:
            break
        known += 1
    if not known or event.block_size != block_size:
        return None
    ids = event.token_ids[: known * block_size]
    return BlocksStored(event.block_hashes[:known], event.parent_block_hash, ids, lora, salt)
