"""R15: which headers pass the router."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvbus.router.http import request_id_of
from kvbus.router.http.headers import forwarded, returned


def test_what_belongs_to_one_connection_stays_there() -> None:
    headers = CIMultiDict(
        {
            "Connection": "close, X-Mine",
            "Keep-Alive": "5",
            "Proxy-Authorization": "Basic x",
            "Proxy-Connection": "close",
            "TE": "trailers",
            "Trailer": "X",
            "Upgrade": "h2c",
            "X-Mine": "1",
            "X-Other": "2",
        }
    )
    assert list(forwarded(headers).items()) == list(returned(headers).items()) == [("X-Other", "2")]


def test_a_client_cannot_name_the_rank_and_asks_for_nothing_packed() -> None:
    headers = CIMultiDict({"X-Data-Parallel-Rank": "7", "Accept-Encoding": "gzip", "Authorization": "Bearer k"})
    assert list(forwarded(headers).items()) == [("Authorization", "Bearer k")]


def test_repeated_headers_stay_repeated() -> None:
    cookies = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]
    assert list(returned(CIMultiDict(cookies)).items()) == cookies


@pytest.mark.parametrize(
    ("given", "named"),
    [("req-1", "req-1"), ("x" * 256, "x" * 256), ("x" * 257, ""), ("a b", ""), ("\u00e9", ""), ("", "")],
)
def test_a_request_id_that_can_stand_in_headers_and_logs(given: str, named: str) -> None:
    assert request_id_of({"X-Request-Id": given}) == named
