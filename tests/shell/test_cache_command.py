"""`kvbus cache`: who has what of a prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.fronts import FakeApi
from typer.testing import CliRunner

from kvbus.bus import MemoryBroker, MemoryBus, NobodyError, Node
from kvbus.cli import app
from kvbus.errors import BusUnavailableError
from kvbus.protocol import BlocksStored, CacheLog, Membership
from kvbus.tools import caches
from kvbus.tools.caches import NoTokensError, cache, read_ids
from kvbus.tools.tables import cache_table
from kvbus.tools.traffic import Traffic
from kvbus.wire import CacheRequest, Heartbeat, Role, State, Subjects

SUBJECTS = Subjects("default")
IDS = list(range(64))
BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1, "m", total_blocks=1000, cache_block_size=16)


@asynccontextmanager
async def engines(broker: MemoryBroker, api: FakeApi) -> AsyncIterator[None]:
    """One that has half of :data:`IDS`, and one that does not tell."""
    log = CacheLog("P", 5, "m", 16, 1000)
    log.apply(BlocksStored(["a", "b"], None, IDS[:32]))
    log.take(100)
    nodes = [Node(MemoryBus(broker), SUBJECTS, name=name, membership=Membership()) for name in ("P", "D")]
    beats = [
        replace(BEAT, cache_number=log.number, address=api.address),
        replace(BEAT, engine="D", role=Role.DECODE, cache_block_size=0),
    ]
    for node, beat in zip(nodes, beats, strict=True):
        node.present(lambda number, beat=beat: replace(beat, number=number))  # type: ignore[misc]
    nodes[0].serve(SUBJECTS.whole_caches("P"), CacheRequest, lambda _, asked: log.page(asked.number, asked.offset, 100))
    async with nodes[0], nodes[1]:
        yield


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryBroker]:
    monkeypatch.setattr(caches, "ROUND_S", 0.2)
    monkeypatch.setattr(caches, "CONNECT_TIMEOUT_S", 0.05)
    broker, api = MemoryBroker(), FakeApi()
    api.body = json.dumps({"tokens": IDS}).encode()
    await api.server.start_server()
    async with engines(broker, api):
        yield broker
    await api.server.close()


async def look(broker: MemoryBroker, prompt: str | list[int] | None, **more: str) -> caches.CacheView:
    return await cache(MemoryBus(broker), SUBJECTS, where="nats://x", prompt=prompt, **more)


@pytest.mark.parametrize("prompt", [IDS, "a text"])
async def test_who_has_what_of_a_prompt(broker: MemoryBroker, prompt: str | list[int]) -> None:
    view = await look(broker, prompt)
    assert (view.prompt_tokens, view.complete) == (64, True)
    decode, prefill = view.engines
    assert (prefill.engine, prefill.blocks, prefill.block_size, prefill.tokens) == ("P", 2, 16, 32)
    assert (decode.engine, decode.blocks, decode.tokens) == ("D", None, None)
    console = Console(width=100, record=True)
    console.print(cache_table(view.engines, view.prompt_tokens))
    assert "32 (50%)" in console.export_text()


async def test_without_a_prompt_only_blocks_are_shown(broker: MemoryBroker) -> None:
    view = await look(broker, None)
    assert [(row.blocks, row.tokens) for row in view.engines] == [(None, None), (2, None)]
    assert view.prompt_tokens is None


async def test_other_adapters_and_salts_have_nothing(broker: MemoryBroker) -> None:
    for more in ({"lora": "a"}, {"salt": "s"}):
        assert (await look(broker, IDS, **more)).engines[1].tokens == 0


async def test_what_cannot_be_done_is_said(broker: MemoryBroker) -> None:
    with pytest.raises(NoTokensError, match="no engine of that model"):
        await look(broker, "a text", model="other")
    with pytest.raises(NoTokensError, match="32 bits"):
        await look(broker, [-1])
    with pytest.raises(NobodyError, match="no engine is heard"):
        await look(MemoryBroker(), IDS)
    with broker.down(), pytest.raises(BusUnavailableError, match="no NATS server answers at nats://x"):
        await look(broker, IDS)


@pytest.mark.parametrize("text", ["", "7", "[1.5]", '["a"]', "[true]", "{"])
def test_ids_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(NoTokensError, match="no JSON list of whole numbers"):
        read_ids(text)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for words, why in (
        (["Hi", "--tokens", "x"], "not both"),
        (["--tokens", str(tmp_path / "none.json")], "a file that can be read"),
    ):
        result = CliRunner().invoke(app, ["cache", "--nats-url", "nats://127.0.0.1:1", *words])
        assert result.exit_code == 1
        assert why in " ".join(result.output.split())


def test_top_has_the_hit_rate() -> None:
    traffic = Traffic(0.0)
    traffic.hear(BEAT, 1.0)
    assert traffic.snapshot(1.0).engines[0].hit_rate is None
    traffic.hear(replace(BEAT, number=2, prompt_tokens=200, cached_tokens=50), 1.0)
    assert traffic.snapshot(1.0).engines[0].hit_rate == 0.25
