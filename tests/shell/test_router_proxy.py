"""What passes the router on its way between a client and an engine, and what must not (R8, R9, R15)."""

from __future__ import annotations

import gzip

import pytest
from support.fronts import END, ROLE_EVENT, TOKEN_EVENT, fronted

BODY = {"model": "m", "prompt": "hello"}
PATH = "/v1/completions"


async def test_a_packed_answer_reaches_the_client_as_it_was_packed() -> None:
    """R8."""
    async with fronted("P", "D") as front:
        packed = gzip.compress(b'{"packed": true}')
        front["D"].body, front["D"].headers = packed, [("Content-Encoding", "gzip")]
        async with front.client.session.post(front.client.make_url(PATH), json=BODY) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert await answer.json() == {"packed": True}
        assert front["D"].requests[-1][2]["accept-encoding"] == "identity"


async def test_cookies_of_one_client_stay_with_it() -> None:
    """R9, R15."""
    async with fronted("P", "D") as front:
        front["D"].headers = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]
        first = await front.client.post(PATH, json=BODY)
        assert first.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        front.client.session.cookie_jar.clear()
        await front.client.post(PATH, json=BODY)
        assert "cookie" not in front["D"].requests[-1][2]


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_an_engine_that_sends_a_client_elsewhere_is_not_followed(path: str) -> None:
    """R9: a prompt and its key go nowhere but to engines."""
    async with fronted("P", "D") as front:
        front["D"].status, front["D"].headers = 307, [("Location", f"http://{front['P'].address}/v1/chat/completions")]
        answer = await front.client.post(path, json=BODY)
        assert answer.status == 502
        assert "redirect (307), which is not followed" in (await answer.json())["error"]["message"]
        assert {path for path, _, _ in front["P"].requests} <= {PATH}


async def test_every_answer_says_its_request_id() -> None:
    """R15."""
    async with fronted("P", "D") as front:
        named = {"X-Request-Id": "mine-1"}
        front["D"].stream = [ROLE_EVENT, TOKEN_EVENT, END]
        for path, body in ((PATH, BODY), (PATH, {**BODY, "stream": True}), (PATH, {"model": "no"}), ("/nowhere", BODY)):
            assert (await front.client.post(path, json=body, headers=named)).headers["X-Request-Id"] == "mine-1"
            assert (await front.client.post(path, json=body)).headers["X-Request-Id"]
        unfit = (await front.client.post(PATH, json=BODY, headers={"X-Request-Id": "a b"})).headers["X-Request-Id"]
        assert unfit != "a b"


async def test_proxies_are_asked_to_pass_a_stream_on_at_once() -> None:
    """R15."""
    async with fronted("P", "D") as front:
        front["D"].stream = [ROLE_EVENT, TOKEN_EVENT, END]
        answer = await front.client.post(PATH, json={**BODY, "stream": True})
        assert (answer.headers["X-Accel-Buffering"], answer.headers["Cache-Control"]) == ("no", "no-cache")
