"""R18: each request is counted once, when it has ended, and written once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from support.fronts import END, ROLE_EVENT, TOKEN_EVENT, fronted
from support.waiting import eventually

from kvbus.errors import ConfigError
from kvbus.router.http import Access, Clients
from kvbus.router.metrics import OUTCOMES
from kvbus.router.settings import Settings

CHAT = "/v1/chat/completions"
COUNTED = "kvbus_router_http_requests_total"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, logger = Lines(), logging.getLogger("kvbus.access")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    logger.propagate = True


async def test_each_request_is_written_once(lines: list[str]) -> None:
    async with fronted("P", "D", settings=Settings(access_log="json")) as front:
        front["D"].stream = [ROLE_EVENT, TOKEN_EVENT, END]
        named = {"X-Request-Id": "r1", "Authorization": "Bearer secret"}
        await (await front.client.post(CHAT, json={"model": "m", "stream": True, "x": "prompt"}, headers=named)).read()
        await front.client.get("/nowhere/at/all")
        await eventually(lambda: len(lines) == 2)
        first, second = (json.loads(line) for line in lines)
        wanted = {
            "path": CHAT,
            "status": 200,
            "stream": True,
            "request_id": "r1",
            "model": "m",
            "prefill": "P",
            "decode": "D",
        }
        assert {key: first[key] for key in wanted} == wanted
        assert first["bytes"] >= len(TOKEN_EVENT)
        assert "secret" not in lines[0]
        assert (second["path"], second["status"]) == ("/nowhere/at/all", 404)


async def test_each_request_is_counted_once_also_what_has_no_route() -> None:
    async with fronted("P", "D") as front:
        front["D"].stream = [TOKEN_EVENT, TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        answer = await front.client.post(CHAT, json={"model": "m", "stream": True})
        await answer.content.readuntil(b"\n\n")
        front["D"].hold_rest.set()
        await answer.read()
        await front.client.post("/nowhere", json={})
        await front.client.get(CHAT)
        assert await front.metric(f'{COUNTED}{{code="200",method="POST",model="m",route="{CHAT}"}}') == 1
        assert await front.metric(f'{COUNTED}{{code="404",method="POST",model="",route="other"}}') == 1
        assert await front.metric(f'{COUNTED}{{code="405",method="GET",model="",route="other"}}') == 1
        assert await front.metric('kvbus_router_requests_total{outcome="ok"}') == 1
        assert await front.metric("kvbus_router_bus_connected") == 1
        assert await front.metric("kvbus_router_ttft_seconds_count") == 1
        assert await front.metric("kvbus_router_inter_token_seconds_count") >= 1
        assert await front.metric("process_resident_memory_bytes") > 0


async def test_no_engine_and_an_engines_own_error_are_told_apart_from_too_many_requests() -> None:
    async with fronted("P", "D") as front:
        front["D"].status = 503
        assert (await front.ask()).status >= 500
        await front.leave("D")
        assert (await front.ask()).status == 503
        counts = {name: await front.metric(f'kvbus_router_requests_total{{outcome="{name}"}}') for name in OUTCOMES}
        assert {name: count for name, count in counts.items() if count} == {"server_error": 1, "unavailable": 1}


async def test_a_client_that_leaves_a_stream_counts_once(lines: list[str]) -> None:
    async with fronted("P", "D", settings=Settings(access_log="text")) as front:
        front["D"].stream = [TOKEN_EVENT, TOKEN_EVENT, END]
        front["D"].hold_rest.clear()
        answer = await front.client.post(CHAT, json={"model": "m", "stream": True})
        await answer.content.readany()
        answer.close()
        await eventually(lambda: lines)
        assert "status=499" in lines[0]
        assert await front.metric('kvbus_router_requests_total{outcome="client_left"}') == 1
        assert await front.metric('kvbus_router_requests_total{outcome="ok"}') == 0


def test_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: off, text, json"):
        Access("xml", lambda *_: None, Clients())
