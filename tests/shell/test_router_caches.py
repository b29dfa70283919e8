"""The router chooses engines by what they tell of their prefix caches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.fronts import SUBJECTS, FakeApi, Front, fronted
from support.waiting import eventually

from kvbus.bus import MemoryBus
from kvbus.protocol import BlocksStored, CacheLog
from kvbus.router.fleet import tokenizing
from kvbus.router.http import Answer
from kvbus.router.request import DECODE_HEADER, PREFILL_HEADER
from kvbus.wire import CacheRequest, Heartbeat, Role, State, decode, encode

IDS = list(range(1000, 5000))
TEXT = "word " * 4000
ENGINES = ("P", "Q", "D", "E")


class Tokenizer(FakeApi):
    """An engine that also knows token ids."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.body = json.dumps({"ok": True, "tokens": IDS}).encode()


@asynccontextmanager
async def caching(**cached: int) -> AsyncIterator[Front]:
    """Four engines, each with so many of :data:`IDS` in its cache."""
    apis = {name: Tokenizer(name) for name in ENGINES}
    async with fronted(*ENGINES, apis=apis) as front, MemoryBus(front.broker) as bus:
        for name in ENGINES:
            log = CacheLog(name, 1, "m", 16, 1000)
            ids = IDS[: cached.get(name, 0)]
            log.apply(BlocksStored(range(len(ids) // 16), None, ids))
            log.take(1 << 16)

            def answer(_: str, payload: bytes, log: CacheLog = log) -> bytes:
                asked = decode(payload)
                assert isinstance(asked, CacheRequest)
                return encode(log.page(asked.number, asked.offset, 1 << 16))

            await bus.serve(SUBJECTS.whole_caches(name), answer)
            front.beat(name, cache_block_size=16, cache_number=log.number, free_blocks=1000, total_blocks=1000)
        blocks = sum(tokens // 16 for tokens in cached.values())
        await eventually(lambda: front.node.membership.get("P") is not None)
        async with asyncio.timeout(30):
            while await front.metric("kvbus_router_cache_blocks") != blocks:
                await asyncio.sleep(0.01)
        yield front


async def chosen(front: Front, path: str = "/v1/completions", **body: Any) -> tuple[str, str]:
    answer = await front.ask(path, **body)
    assert answer.status == 200
    return answer.headers[PREFILL_HEADER], answer.headers[DECODE_HEADER]


def asked(front: Front) -> list[dict[str, Any]]:
    return [body for name in ENGINES for path, body, _ in front[name].requests if path == "/tokenize"]


@pytest.mark.parametrize("salt", ["", "s"])
async def test_token_ids_go_where_most_of_them_is_cached(salt: str) -> None:
    async with caching(P=160, Q=3200, D=1600, E=160) as front:
        body: dict[str, Any] = {"cache_salt": salt} if salt else {}
        for number in range(8):
            got = await chosen(front, prompt=IDS, user=f"u{number}", **body)
            if not salt:
                assert got == ("Q", "D")
        assert await front.metric('kvbus_router_choices_total{by="cache"}') == (0 if salt else 8)
        assert asked(front) == []


async def test_a_very_long_prompt_is_looked_up_by_its_beginning() -> None:
    async with caching(Q=3200, E=1600) as front:
        assert await chosen(front, prompt=[*IDS, *range(30_000)]) == ("Q", "E")


async def test_load_outweighs_what_is_cached() -> None:
    async with caching(Q=3200, E=4000) as front:
        front.beat("Q", 2, cache_block_size=16, cache_number=1, total_blocks=1000, queued_tokens=3300)
        front.beat("E", 2, cache_block_size=16, cache_number=1, total_blocks=1000, free_blocks=1000, requests=9)
        await front.knows("Q", "E")
        assert await chosen(front, prompt=IDS) == ("P", "D")


async def test_a_long_text_is_turned_into_token_ids_once() -> None:
    async with caching(Q=3200, E=1600) as front:
        for _ in range(3):
            assert await chosen(front, prompt=TEXT) == ("Q", "E")
        turns = [{"role": "user", "content": TEXT}]
        assert await chosen(front, "/v1/chat/completions", messages=turns, tools=[], temperature=0) == ("Q", "E")
        questions = asked(front)
        assert len(questions) == 2
        assert {"model": "m", "prompt": TEXT} in questions
        assert {"model": "m", "messages": turns, "tools": []} in questions
        assert await front.metric('kvbus_router_tokenize_total{outcome="remembered"}') == 2


async def test_a_shorter_text_is_asked_for_when_its_session_is_known() -> None:
    async with caching(Q=3200, E=1600) as front:
        for _ in range(3):
            await chosen(front, prompt="word " * 500, user="u")
        assert len(asked(front)) == 1
        await chosen(front, prompt="Hi", user="u")
        assert len(asked(front)) == 1


async def test_a_prompt_that_an_engine_refuses_to_tokenize_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one client could turn this choice off for all."""
    answers = iter([400, 200])

    async def post(*_: Any) -> Answer:
        return Answer(next(answers), b'{"tokens": [1, 2]}')

    monkeypatch.setattr(tokenizing.upstream, "post", post)
    asker, engine = tokenizing.Tokenizing(), Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1)
    assert await asker.ids(None, engine, {"prompt": "x"}, {}) is None  # type: ignore[arg-type]
    assert list(await asker.ids(None, engine, {"prompt": "y"}, {}) or ()) == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["slow", "refused", "nonsense", "huge"])
async def test_whatever_goes_wrong_the_head_decides(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with caching(Q=3200, E=1600) as front:
        for name in ENGINES:
            match fault:
                case "slow":
                    front[name].hold.clear()
                case "refused":
                    front[name].headers = []
                    front[name].body = b'{"tokens": null}'
                case "nonsense":
                    front[name].body = b"{"
                case _:
                    monkeypatch.setattr(tokenizing, "MAX_PROMPT_TOKENS", 10)
        asking = front.ask("/v1/completions", prompt=f"first {TEXT}")
        await eventually(lambda: any(path != "/tokenize" for path, *_ in front["P"].requests + front["Q"].requests))
        for name in ENGINES:
            front[name].hold.set()
        assert (await asking).status == 200
        for number in range(2):
            await chosen(front, prompt=f"{number} {TEXT}")
        assert await front.metric('kvbus_router_choices_total{by="head"}') == 3
        assert await front.metric('kvbus_router_tokenize_total{outcome="failed"}') == 1, "then there is a pause"
        assert await front.metric('kvbus_router_tokenize_total{outcome="busy"}') == 2


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [TEXT, TEXT]},
        {"prompt": [IDS, IDS]},
        {"prompt": [-1] * 4000},
        {"prompt": ["a", *IDS]},
        {"prompt": [1, "a"] * 2000},
    ],
)
async def test_other_prompts_are_chosen_for_by_their_heads(body: dict[str, Any]) -> None:
    async with caching(Q=3200, E=1600) as front:
        await chosen(front, **body)
        assert await front.metric('kvbus_router_choices_total{by="head"}') == 1
        assert asked(front) == []


async def test_pictures_are_not_fetched_for_it() -> None:
    async with caching(Q=3200, E=1600) as front:
        content = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}, {"type": "text", "text": TEXT}]
        await chosen(front, "/v1/chat/completions", messages=[{"role": "user", "content": content}])
        assert asked(front) == []


async def test_nobody_is_asked_where_no_engine_tells_of_its_cache() -> None:
    async with fronted(*ENGINES, apis={name: Tokenizer(name) for name in ENGINES}) as front:
        await chosen(front, prompt=TEXT)
        assert asked(front) == []
        assert await front.metric('kvbus_router_choices_total{by="head"}') == 1


async def test_nobody_is_asked_where_there_is_no_choice() -> None:
    async with caching(Q=3200) as front:
        for name in ("P", "D"):
            await front.leave(name)
        assert await chosen(front, prompt=TEXT) == ("Q", "E")
        assert asked(front) == []
