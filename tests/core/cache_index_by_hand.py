"""Prints what the cache index costs in memory and time: ``python tests/core/cache_index_by_hand.py [ENGINES]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import reduce
from operator import xor
from pathlib import Path
from random import Random
from statistics import median

from kvbus.protocol import CacheIndex, EngineLeft, Prompt
from kvbus.protocol.cache_keys import pack
from kvbus.wire import CachePage, CacheUpdate, Heartbeat, Role, State

BLOCKS, PROMPT_TOKENS, BLOCK_SIZE, BATCH = 1_000_000, 16_000, 16, 1000
PAGE_BYTES = 4096


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


def took_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def main(engines: int) -> None:
    random, index, before = Random(1), CacheIndex(), resident_mb()
    prompt = Prompt("m", [random.randrange(150_000) for _ in range(PROMPT_TOKENS)])
    head = [key for keys in prompt.slices(BLOCK_SIZE) for key in keys]
    updates: list[float] = []
    for engine in (f"e{number}" for number in range(engines)):
        beat = Heartbeat(engine, 1, 1, Role.PREFILL, State.READY, 1, "m", total_blocks=BLOCKS, cache_block_size=16)
        index.apply(beat, 0.0)
        index.apply(CachePage(engine, 1, 0, bytes(8), 0), 0.0)
        check = 0
        for number in range(1, BLOCKS // engines // BATCH + 1):
            keys = head if number == 1 else [random.getrandbits(64) for _ in range(BATCH)]
            check = reduce(xor, keys, check)
            update = CacheUpdate(engine, 1, number, pack([check]), pack(keys))
            updates.append(took_ms(lambda update=update: index.apply(update, 0.0)))  # type: ignore[misc]
    assert not index.mended
    assert index.held(prompt) == {f"e{number}": PROMPT_TOKENS for number in range(engines)}
    lookups = [took_ms(lambda: index.held(prompt)) for _ in range(50)]
    strange = Prompt("m", [1, *prompt.token_ids])
    misses = [took_ms(lambda: index.held(strange)) for _ in range(50)]
    print(f"{sum(index.blocks().values()):,} blocks of {engines} engines: {resident_mb() - before:.0f} MB")
    print(f"an update of {BATCH} blocks: median {median(updates):.2f} ms, longest {max(updates):.1f} ms")
    print(f"a lookup of {PROMPT_TOKENS} tokens that all have: {median(lookups):.2f} ms; none: {median(misses):.2f} ms")
    print(f"an engine leaves: {took_ms(lambda: index.apply(EngineLeft('e0', 1), 0.0)):.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
