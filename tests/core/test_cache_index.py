"""What engines tell of their prefix caches, and the index that is made of it."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import xor
from random import Random

import pytest

from kvbus.protocol import (
    AskCache,
    BlocksRemoved,
    BlocksStored,
    CacheIndex,
    CacheLog,
    Cleared,
    EngineLeft,
    Prompt,
)
from kvbus.protocol.cache_keys import bytes_of, chain, pack, seed_of, unpack
from kvbus.wire import CachePage, CacheUpdate, Heartbeat, Role, State

BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1, "m", total_blocks=1000, cache_block_size=4)
IDS = list(range(100, 148))  # 12 blocks
PROMPT = Prompt("m", IDS)
KNOWN = ["babb2b89a86dbffa", "26ab10299da36a49"]


def log_of(engine: str = "P", max_blocks: int = 1000) -> CacheLog:
    return CacheLog(engine, 5, "m", 4, max_blocks)


def stored(ids: list[int], upto: int | None = None, **more: str) -> BlocksStored:
    """A prompt's blocks from its beginning on, under names that vLLM could give them."""
    blocks = len(ids) // 4 if upto is None else upto
    whole = ids[: 4 * blocks]
    return BlocksStored([str((whole[: 4 * n], more)) for n in range(1, blocks + 1)], None, whole, **more)


class Both:
    """An engine's log and a router's index, and what goes between them."""

    def __init__(self, max_keys: int = 1 << 16, blocks: int = 1000) -> None:
        self.log, self.index, self.max_keys = log_of(max_blocks=blocks), CacheIndex(), max_keys
        self.beats, self.now, self.asked = 0, 0.0, 0

    def beat(self) -> None:
        self.beats, self.now = self.beats + 1, self.now + 0.5
        self.answer(self.index.apply(replace(BEAT, number=self.beats, cache_number=self.log.number), self.now))

    def answer(self, asked: list[AskCache]) -> None:
        while asked:
            self.asked += 1
            [question] = asked
            page = self.log.page(question.number, question.offset, self.max_keys)
            asked = self.index.apply(page, self.now)

    def hear(self, *updates: CacheUpdate) -> None:
        for update in updates:
            self.answer(self.index.apply(update, self.now))

    def tell(self) -> None:
        self.hear(*self.log.take(self.max_keys))

    @property
    def held(self) -> dict[str, int]:
        return self.index.held(PROMPT)


@pytest.fixture
def both() -> Both:
    both = Both()
    both.beat()
    return both


class TestKeys:
    def test_a_key_depends_on_all_that_decides_about_kv(self) -> None:
        prompts = [
            PROMPT,
            Prompt("n", IDS),
            Prompt("m", IDS, "lora"),
            Prompt("m", IDS, "", "salt"),
            Prompt("m", IDS[4:]),
        ]
        keys = [key for prompt in prompts for slice_ in prompt.slices(4) for key in slice_]
        assert len(set(keys)) == len(keys) == 4 * 12 + 11
        assert not set(keys) & {key for slice_ in PROMPT.slices(8) for key in slice_}
        assert seed_of("a", 1, "bc") != seed_of("ab", 1, "c"), "words do not run together"

    def test_slices_are_one_chain(self) -> None:
        ids = [Random(1).randrange(1 << 32) for _ in range(16 * 300 + 5)]
        whole = b"".join(chain(seed_of("m", 16), bytes_of(ids), 16))
        slices = list(Prompt("m", ids).slices(16))
        assert b"".join(pack(each) for each in slices) == whole
        assert len(whole) == 300 * 8
        assert len(slices) == 5

    def test_the_keys_stay_the_same_from_version_to_version(self) -> None:
        assert [f"{key:016x}" for key in next(Prompt("m", [1, 2, 3, 4], "l", "s").slices(2))] == KNOWN

    @pytest.mark.parametrize("ids", [["a"], [-1], [1 << 32], [1.5], [None], [[1]]])
    def test_what_is_no_token_id_is_refused(self, ids: list[int]) -> None:
        with pytest.raises(ValueError, match="32 bits"):
            bytes_of(ids)


class TestLog:
    def test_only_changes_are_told(self) -> None:
        log = log_of()
        log.apply(stored(IDS))
        [first] = log.take(100)
        assert (first.number, len(first.stored), first.removed) == (1, 12 * 8, b"")
        assert log.take(100) == []
        log.apply(BlocksRemoved(stored(IDS).names[11:]))
        log.apply(stored(IDS, 12))  # a copy of each, and the last one again
        assert log.take(100) == [], "what left and came back has not changed"

    def test_a_block_is_gone_with_its_last_copy(self) -> None:
        log = log_of()
        for _ in range(2):
            log.apply(stored(IDS))
        log.take(100)
        log.apply(BlocksRemoved(stored(IDS).names))
        assert log.take(100) == []
        log.apply(BlocksRemoved(stored(IDS).names))
        [update] = log.take(100)
        assert len(update.removed) == 12 * 8
        assert not any(update.check)
        log.apply(BlocksRemoved(stored(IDS).names))
        assert log.take(100) == []
        assert len(log) == 0

    def test_large_changes_are_cut_into_numbered_pieces(self, both: Both) -> None:
        both.log.apply(stored(IDS))
        both.tell()
        both.log.apply(Cleared())
        both.log.apply(stored(IDS[4:]))
        updates = both.log.take(5)
        assert [(each.number, each.cleared) for each in updates] == [(2, True), (3, False), (4, False)]
        both.hear(*updates)
        assert both.index.held(Prompt("m", IDS[4:])) == {"P": 44}
        assert both.held == {}
        assert not both.index.mended

    def test_blocks_whose_parent_or_shape_is_unknown_are_left_out(self) -> None:
        log = log_of()
        log.apply(BlocksStored(["x"], "never stored", IDS[:4]))
        log.apply(BlocksStored(["x"], None, IDS[:8]))
        assert log.take(100) == []
        assert log.unnamed == 2
        log.apply(stored(IDS, 3))
        log.apply(BlocksStored(["child"], stored(IDS, 3).names[-1], IDS[12:16]))
        [update] = log.take(100)
        assert update.stored
        assert {*zip(*[iter(update.stored)] * 8, strict=True)} == {
            *zip(*[iter(b"".join(pack(keys) for keys in Prompt("m", IDS[:16]).slices(4)))] * 8, strict=True)
        }

    def test_it_holds_no_more_than_the_engine_has_blocks(self) -> None:
        """vLLM's events do not add up: the oldest are forgotten, and that is told."""
        both = Both(blocks=10)
        both.beat()
        for first in range(0, 400, 4):
            both.log.apply(stored([*range(first, first + 16)]))
            both.tell()
        assert len(both.log) == 10
        assert both.index.blocks() == {"P": 10}
        assert not both.index.mended

    def test_a_snapshot_is_of_one_moment_page_by_page(self) -> None:
        log = log_of()
        log.apply(stored(IDS))
        log.take(100)
        first = log.page(0, 0, 5)
        log.apply(Cleared())
        log.take(100)
        rest = [log.page(first.number, offset, 5) for offset in (5, 10)]
        assert {len(page.keys) for page in (first, *rest)} == {40, 16}
        assert {(page.number, page.total, page.check) for page in (first, *rest)} == {(1, 12, first.check)}
        assert log.page(77, 5, 5) == CachePage("P", 5, 2, bytes(8), 0), "nobody asked for that one: from the beginning"
        assert log.page(1, 99, 5).keys == b""


class TestIndex:
    def test_it_follows_an_engine(self, both: Both) -> None:
        assert both.held == {}
        both.log.apply(stored(IDS, 3))
        both.tell()
        assert both.held == {"P": 12}
        assert both.index.blocks() == {"P": 3}
        assert both.index.whole()
        both.log.apply(BlocksRemoved(stored(IDS, 3).names[2:]))
        both.tell()
        assert both.held == {"P": 8}
        both.log.apply(Cleared())
        both.tell()
        assert both.held == {}
        assert both.asked == 1

    def test_lora_adapters_and_salts_do_not_mix(self, both: Both) -> None:
        both.log.apply(stored(IDS, lora="a"))
        both.log.apply(stored(IDS, 5, salt="s"))
        both.tell()
        assert both.held == {}
        assert both.index.held(Prompt("n", IDS, "a")) == {}
        assert both.index.held(Prompt("m", IDS, "a")) == {"P": 48}
        assert both.index.held(Prompt("m", IDS, "", "s")) == {"P": 20}

    def test_who_comes_late_asks_for_all_of_it(self) -> None:
        both = Both(max_keys=5)
        both.log.apply(stored(IDS))
        both.log.take(100)
        both.beat()
        assert both.held == {"P": 48}
        assert both.asked == 3

    def test_a_lost_update_is_noticed_by_the_next(self, both: Both) -> None:
        both.log.apply(stored(IDS, 3))
        both.log.take(100)
        both.log.apply(stored(IDS))
        both.tell()
        for _ in range(4):  # two seconds after it last asked, that it was late
            both.beat()
        assert both.held == {"P": 48}
        assert both.index.mended == 1

    def test_a_lost_update_with_none_after_it_is_noticed_by_heartbeats(self, both: Both) -> None:
        both.log.apply(stored(IDS))
        both.log.take(100)
        both.beat()
        assert both.held == {}, "it may be on its way"
        for _ in range(4):
            both.beat()
        assert both.held == {"P": 48}
        assert both.index.mended == 1

    def test_updates_while_it_asks_are_not_lost(self, both: Both) -> None:
        both.log.apply(stored(IDS, 3))
        both.log.take(100)
        both.now = 100.0
        both.log.apply(stored(IDS, 6))
        [asked] = both.index.apply(both.log.take(100)[0], both.now)
        page = both.log.page(asked.number, asked.offset, 100)
        both.log.apply(stored(IDS))
        both.hear(*both.log.take(100))
        both.index.apply(page, both.now)
        assert both.held == {"P": 48}
        assert both.index.whole()

    @pytest.mark.parametrize("check", ["right", "wrong"])
    def test_a_forged_update_is_mended(self, both: Both, check: str) -> None:
        both.log.apply(stored(IDS, 3))
        both.tell()
        liar = log_of()
        liar.apply(stored(IDS, 3))
        liar.take(100)
        liar.apply(stored(IDS))
        [forged] = liar.take(100)
        both.now = 100.0
        both.hear(replace(forged, check=forged.check if check == "right" else bytes(8)))
        for _ in range(4):
            both.beat()
        assert both.held == {"P": 12}
        assert both.index.mended == 1

    def test_a_liar_cannot_make_it_ask_all_the_time(self, both: Both) -> None:
        for second in range(100):
            both.now = float(second)
            both.hear(CacheUpdate("P", 5, 1000 + second, bytes(8)))
            both.beat()
        assert both.asked < 12

    def test_old_doubled_and_foreign_ones_change_nothing(self, both: Both) -> None:
        both.log.apply(stored(IDS, 3))
        [update] = both.log.take(100)
        both.hear(
            update, update, replace(update, number=0), replace(update, engine="Q"), replace(update, incarnation=4)
        )
        both.index.apply(CachePage("P", 5, 9, bytes(8), 0), both.now)
        both.index.apply(EngineLeft("P", 4), both.now)
        assert both.held == {"P": 12}
        assert both.index.refused == 5
        assert both.index.mended == 0

    def test_an_engine_tells_no_more_blocks_than_its_heartbeat(self, both: Both) -> None:
        keys = pack(range(1, 1002))
        assert both.index.apply(CacheUpdate("P", 5, 1, bytes(8), keys), both.now) == []
        assert both.index.blocks() == {"P": 0}
        assert both.index.refused == 1
        both.index.apply(CachePage("P", 5, 1, bytes(8), 1001, 0, keys), both.now)
        assert both.index.blocks() == {"P": 0}
        assert both.index.refused == 2

    def test_all_engines_together_are_bounded(self) -> None:
        index = CacheIndex(max_blocks=15)
        for engine in ("P", "Q"):
            index.apply(replace(BEAT, engine=engine), 0.0)
            log = CacheLog(engine, 5, "m", 4, 100)
            log.apply(stored(IDS))
            log.take(100)
            index.apply(log.page(0, 0, 100), 0.0)
        assert index.blocks() == {"P": 12, "Q": 0}

    def test_a_damaged_page_is_asked_for_again(self, both: Both) -> None:
        both.log.apply(stored(IDS))
        both.log.take(100)
        index = CacheIndex()
        assert index.apply(BEAT, 0.0) == [AskCache("P")]
        page = both.log.page(0, 0, 100)
        for damaged in (
            replace(page, keys=bytes(8) + page.keys[8:]),
            replace(page, check=bytes(8)),
            replace(page, offset=3),
        ):
            assert index.apply(damaged, 0.1) == []
            assert index.held(PROMPT) == {}
        assert index.apply(replace(BEAT, number=2), 0.9) == []
        assert index.apply(replace(BEAT, number=3), 1.1) == [AskCache("P")]
        index.apply(page, 1.2)
        assert index.held(PROMPT) == {"P": 48}

    def test_a_cache_goes_with_its_engine(self, both: Both) -> None:
        both.log.apply(stored(IDS))
        both.tell()
        both.index.apply(EngineLeft("P", 5), both.now)
        assert both.held == {}
        assert both.index.blocks() == {}

    def test_a_new_incarnation_begins_with_nothing(self, both: Both) -> None:
        both.log.apply(stored(IDS))
        both.tell()
        assert both.index.apply(replace(BEAT, incarnation=6), both.now) == [AskCache("P")]
        assert both.held == {}
        both.index.apply(replace(BEAT, incarnation=7, cache_block_size=0), both.now)
        assert both.index.blocks() == {}

    def test_engines_are_compared(self, both: Both) -> None:
        other = log_of("Q")
        for log, blocks in ((both.log, 3), (other, 11)):
            log.apply(stored(IDS, blocks))
            log.take(100)
            page = log.page(0, 0, 100)
            both.index.apply(EngineLeft(page.engine, 5), 0.0)
            both.index.apply(replace(BEAT, engine=page.engine), 0.0)
            both.index.apply(page, 0.0)
        assert both.held == {"P": 12, "Q": 44}


def walk(random: Random) -> Iterator[tuple[str, list[int]]]:
    heads = [[random.randrange(50) for _ in range(4 * 20)] for _ in range(4)]
    for _ in range(300):
        head = random.choice(heads)
        yield random.choices(["store", "remove", "clear"], [6, 4, 0.1])[0], head[: 4 * random.randrange(1, 20)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_doubled_it_comes_right_in_the_end(seed: int) -> None:
    random = Random(seed)
    both = Both(max_keys=random.choice([3, 10, 1000]))
    both.beat()
    for what, ids in walk(random):
        match what:
            case "store":
                both.log.apply(stored(ids))
            case "remove":
                both.log.apply(BlocksRemoved(stored(ids).names[random.randrange(len(ids) // 4) :]))
            case _:
                both.log.apply(Cleared())
        for update in both.log.take(both.max_keys):
            both.hear(*[update] * random.choices([0, 1, 2], [1, 8, 1])[0])
        if random.random() < 0.3:
            both.beat()
    for _ in range(200):
        both.beat()
    assert both.index.whole()
    assert both.index.blocks() == {"P": len(both.log)}
    kept, mended = both.log.page(0, 0, 1 << 16), both.index.mended
    both.hear(CacheUpdate("P", 5, both.log.number + 1, kept.check))  # it says no, if the keys are other ones
    assert both.index.mended == mended


class TestCost:
    """Bounds are twenty times what a quiet machine needs."""

    def test_an_update_and_a_lookup_are_cheap(self) -> None:
        log, index = CacheLog("P", 5, "m", 16, 1 << 20), CacheIndex()
        index.apply(replace(BEAT, total_blocks=1 << 20, cache_block_size=16), 0.0)
        index.apply(log.page(0, 0, 100), 0.0)
        ids = [Random(3).randrange(150_000) for _ in range(16_000)]
        log.apply(BlocksStored(range(1000), None, ids))
        [update] = log.take(1 << 16)
        began = time.perf_counter()
        index.apply(update, 0.0)
        updated = time.perf_counter()
        assert index.held(Prompt("m", ids)) == {"P": 16_000}
        looked_up = time.perf_counter()
        assert updated - began < 0.02
        assert looked_up - updated < 0.02

    def test_a_million_blocks_take_less_than_200_mb(self) -> None:
        """A tenth of them is measured."""
        random, index = Random(5), CacheIndex()
        keys = [pack([random.getrandbits(64) for _ in range(25_000)]) for _ in range(4)]
        tracemalloc.start()
        try:
            for number, each in enumerate(keys):
                index.apply(replace(BEAT, engine=f"e{number}", total_blocks=1 << 20), 0.0)
                check = pack([reduce(xor, unpack(each))])
                index.apply(CachePage(f"e{number}", 5, 1, check, 25_000, 0, each), 0.0)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert sum(index.blocks().values()) == 100_000
        assert taken < 20e6
