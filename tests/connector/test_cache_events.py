"""What an engine tells of its prefix cache, from vLLM's own block pool to a router's index."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvbus_connector.cache_events import CacheEvents, read_event
from kvbus_connector.hits import Hits
from support.waiting import eventually

from kvbus.bus import Caches, MemoryBroker, MemoryBus, Node
from kvbus.protocol import BlocksRemoved, BlocksStored, Cleared, Membership, Prompt
from kvbus.wire import CacheUpdate, Heartbeat, Role, State, Subjects, decode, encode

SUBJECTS = Subjects("default")
OWN = Heartbeat("P", 5, 0, Role.PREFILL, State.READY, 1, "m", "h:1", total_blocks=64, cache_block_size=4)
IDS = list(range(100, 148))
UPDATES = "kvbus.v1.default.cache.P"


def node_of(broker: MemoryBroker, name: str, heartbeat_s: float = 0.02) -> Node:
    membership = Membership(dead_after_s=30.0)
    return Node(MemoryBus(broker), SUBJECTS, name=name, membership=membership, heartbeat_interval_s=heartbeat_s)


class Pool:
    """A block pool's events, and how vLLM's scheduler takes them."""

    num_gpu_blocks = 64

    def __init__(self, *, wanted: bool = False) -> None:
        self.enable_kv_cache_events = wanted
        self.queue: list[Any] = []

    def take_events(self) -> list[Any]:
        events, self.queue = self.queue, []
        return events

    def tell(self, *events: Any) -> list[Any]:
        """A step of vLLM's."""
        self.queue += events if self.enable_kv_cache_events else ()
        return self.take_events()


class BlockStored(SimpleNamespace):
    pass


class BlockRemoved(SimpleNamespace):
    pass


class AllBlocksCleared:
    pass


def stored(blocks: int = 12, first: int = 0, **changes: Any) -> BlockStored:
    about: dict[str, Any] = {
        "block_hashes": [f"h{number}" for number in range(first, blocks)],
        "parent_block_hash": f"h{first - 1}" if first else None,
        "token_ids": IDS[4 * first : 4 * blocks],
        "block_size": 4,
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
    }
    return BlockStored(**{**about, **changes})


def removed(first: int, last: int = 12, group: int = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=[f"h{number}" for number in range(first, last)], group_idx=group)


class TestReading:
    def test_blocks_of_other_groups_and_sizes_are_not_told(self) -> None:
        assert read_event(stored(group_idx=1), 0, 4) is None
        assert read_event(removed(0, group=1), 0, 4) is None
        assert read_event(stored(block_size=2), 0, 4) is None
        assert read_event(AllBlocksCleared(), 0, 4) == Cleared()
        assert read_event(removed(10), 0, 4) == BlocksRemoved(["h10", "h11"])

    @pytest.mark.parametrize(
        ("extra", "lora", "blocks", "salt"),
        [
            (None, None, 3, ""),
            ([None, None, None], None, 3, ""),
            ([("a",)] * 3, "a", 3, ""),
            ([("a", "s"), ("a",), ("a",)], "a", 3, "s"),
            ([("s",), None, None], None, 3, "s"),
            ([None, ("picture", 3), None], None, 1, ""),
            ([("a",), ("a", ("picture", 3)), ("a",)], "a", 1, ""),
            ([("a",), ("a", b"embeddings"), ("a",)], "a", 1, ""),
            ([("s", b"embeddings"), None, None], None, 0, ""),
            ([None, ("not at the beginning",), None], None, 1, ""),
        ],
    )
    def test_what_decides_about_kv_besides_tokens(self, extra: Any, lora: Any, blocks: int, salt: str) -> None:
        read = read_event(stored(3, extra_keys=extra, lora_name=lora), 0, 4)
        names = [f"h{number}" for number in range(blocks)]
        assert read == (BlocksStored(names, None, IDS[: 4 * blocks], lora or "", salt) if blocks else None)


class Engine:
    def __init__(self, broker: MemoryBroker, pool: Any = None) -> None:
        self.node, self.pool = node_of(broker, "P"), pool or Pool()
        self.events = CacheEvents(self.node, OWN, 0)
        self.events.watch(self.pool)
        self.node.present(lambda number: replace(OWN, number=number, cache_number=self.events.number))


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@contextlib.asynccontextmanager
async def running(
    broker: MemoryBroker, pool: Any = None
) -> AsyncIterator[tuple[Engine, Callable[[], dict[str, int]], Caches]]:
    engine, router = Engine(broker, pool), node_of(broker, "kvbus-router")
    caches = Caches(router)
    async with engine.node, router:
        yield engine, lambda: caches.index.held(Prompt("m", IDS)), caches
    engine.events.close()
    engine.events.close()


class TestTelling:
    async def test_a_router_knows_what_is_cached(self, broker: MemoryBroker) -> None:
        async with running(broker) as (engine, held, caches):
            assert engine.pool.tell(stored(9)) == [], "vLLM's own publisher was not asked for"
            await eventually(lambda: held() == {"P": 36})
            engine.pool.tell(stored(12, first=9))
            engine.pool.tell(removed(11))
            await eventually(lambda: held() == {"P": 44})
            engine.pool.tell(AllBlocksCleared())
            await eventually(lambda: held() == {})
            assert caches.index.mended == 0
            assert engine.node.counters["cache: stored"] == 12 - 1

    async def test_events_that_the_user_asked_for_stay_vllms(self, broker: MemoryBroker) -> None:
        engine = Engine(broker, Pool(wanted=True))
        event = stored(3)
        assert engine.pool.tell(event) == [event]
        engine.events.close()

    async def test_who_comes_late_hears_all_of_it(self, broker: MemoryBroker) -> None:
        broker.max_payload = 1024 + 5 * 8  # five keys in a message
        engine, router = Engine(broker), node_of(broker, "kvbus-router")
        caches = Caches(router)
        async with engine.node:
            engine.pool.tell(stored())
            await eventually(lambda: engine.events.number == 3)
            async with router:
                await eventually(lambda: caches.index.held(Prompt("m", IDS)) == {"P": 48})
        engine.events.close()

    async def test_a_lost_batch_is_mended(self, broker: MemoryBroker) -> None:
        async with running(broker) as (engine, held, caches):
            await eventually(caches.index.blocks)
            with broker.dropping(UPDATES):
                engine.pool.tell(stored(9))
                await eventually(lambda: engine.events.number == 1)
            await eventually(lambda: held() == {"P": 36})
            assert caches.index.mended == 1

    async def test_forged_doubled_and_damaged_batches_are_mended(self, broker: MemoryBroker) -> None:
        async with running(broker) as (engine, held, caches):
            engine.pool.tell(stored(9))
            await eventually(lambda: held() == {"P": 36})
            [payload] = [payload for subject, payload in broker.log if subject == UPDATES]
            update = decode(payload)
            assert isinstance(update, CacheUpdate)
            for forged in (
                payload,
                payload[:-9],
                encode(replace(update, engine="Q")),
                encode(replace(update, incarnation=4)),
                encode(replace(update, number=2, stored=b"", removed=update.stored, check=bytes(8))),
            ):
                broker.route(UPDATES, forged)
            await eventually(lambda: held() == {} or caches.index.mended)
            await eventually(lambda: held() == {"P": 36})
            assert caches.index.mended == 1

    async def test_what_came_too_fast_is_forgotten(self, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        async with running(broker) as (engine, held, _):
            engine.pool.tell(stored(9))
            await eventually(lambda: held() == {"P": 36})
            monkeypatch.setattr("kvbus_connector.cache_events.MAX_QUEUED", 0)
            engine.pool.tell(stored(12, first=9))
            monkeypatch.undo()
            engine.pool.tell(removed(11))
            await eventually(lambda: held() == {})
            engine.pool.tell(stored(5))
            await eventually(lambda: held() == {"P": 20})
            assert engine.node.counters["cache: events lost"] == 1

    async def test_an_event_that_cannot_be_read_ends_nothing(self, broker: MemoryBroker) -> None:
        async with running(broker) as (engine, held, _):
            engine.pool.tell(stored(3, token_ids=["x"] * 12))
            await eventually(lambda: engine.node.counters["callback_errors"] == 1)
            engine.pool.tell(stored(9))
            engine.pool.tell(stored(5))
            await eventually(lambda: engine.node.counters["cache: events lost"] == 1)
            engine.pool.tell(stored(5))
            await eventually(lambda: held() == {"P": 20})


def test_hits_count_what_was_found_first() -> None:
    hits, request = Hits(), SimpleNamespace(request_id="r", num_prompt_tokens=100)
    hits.looked_up(request, 32)
    hits.looked_up(request, 96)
    assert (hits.prompt_tokens, hits.cached_tokens) == (0, 0)
    hits.finished(request)
    hits.finished(request)
    assert (hits.prompt_tokens, hits.cached_tokens) == (100, 32)


async def test_the_installed_vllms_block_pool(broker: MemoryBroker) -> None:
    block_pool = pytest.importorskip("vllm.v1.core.block_pool")
    pool = block_pool.BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=4)
    hashes = [bytes([number]) * 32 for number in range(12)]
    about = {"lora_request": None, "session_id": None, "mm_features": [], "cache_salt": "s", "prompt_embeds": None}
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=IDS, **about)
    prompt = Prompt("m", IDS, salt="s")
    async with running(broker, pool) as (engine, _, caches):
        blocks = pool.get_new_blocks(9)
        pool.cache_full_blocks(request, blocks, 0, 7, 4, 0)
        assert pool.take_events() == []
        await eventually(lambda: caches.index.held(prompt) == {"P": 28})
        pool.cache_full_blocks(request, blocks, 7, 9, 4, 0)
        pool.take_events()
        await eventually(lambda: caches.index.held(prompt) == {"P": 36})
        pool.free_blocks(reversed(blocks))
        pool.get_new_blocks(10)  # six never used, and the last four of the prompt
        pool.take_events()
        await eventually(lambda: caches.index.held(prompt) == {"P": 20})
        assert engine.events.number == 3
