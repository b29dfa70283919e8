"""R6, R10: bodies are looked at, not parsed, and go on as they came but for what is ours to say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.router.fleet import affinity_of, prompt_tokens
from kvbus.router.http import Answer, Raw, RefusedError, lazy_json, parse
from kvbus.router.http.lazy_json import SHORT_BYTES, members, pieces
from kvbus.router.request import CHAT, RESPONSES
from kvbus.router.request.leg_bodies import decode_leg, prefill_leg, transfers_of

LONG = list(range(100_000, 100_000 + SHORT_BYTES // 6))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6), st.sampled_from([None, 1]), st.booleans())
async def test_nothing_is_lost_or_changed(body: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    content = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_json, "SHORT_BYTES", 8)
        patch.setattr(lazy_json, "SLICE_BYTES", 16)
        patch.setattr(lazy_json, "MARKS", 4)
        found = await members(content)
    assert json.loads(b"".join(pieces(found))) == body


@pytest.mark.parametrize(
    "value",
    [
        LONG,
        [LONG, LONG],
        "x" * SHORT_BYTES,
        ['\\"' * 3, "x" * SHORT_BYTES],
        [{"role": "user", "content": "a" * SHORT_BYTES}],
    ],
    ids=["ids", "several", "text", "texts", "messages"],
)
async def test_a_long_value_stays_as_it_came(value: Any) -> None:
    written = json.dumps(value, separators=(" ,", " : ")).encode()
    body = await parse(b'{"model": "m", "n": 2, "prompt": ' + written + b"}")
    assert isinstance(body["prompt"], Raw)
    assert (body["model"], body["n"]) == ("m", 2)
    leg = b"".join(pieces(prefill_leg(body, "t", "p", CHAT)))
    assert written in leg
    assert json.loads(leg)["prompt"] == value
    names = transfers_of(body, "t", CHAT)
    several = isinstance(value, list) and not isinstance(value[0], int)
    assert len(names) == 2 * (len(value) if several else 1)


async def test_tokens_are_counted_and_heads_told_apart() -> None:
    ids, text = [await parse(b'{"prompt": ' + json.dumps(each).encode() + b"}") for each in (LONG, "x" * SHORT_BYTES)]
    assert abs(prompt_tokens(ids) - len(LONG)) <= 2
    assert SHORT_BYTES // 4 <= prompt_tokens(text) <= SHORT_BYTES // 4 + 2
    assert affinity_of(ids, None) != affinity_of(text, None)
    turns = await parse(b'{"input": ' + json.dumps([{"content": "a" * SHORT_BYTES}]).encode() + b"}")
    assert "messages" in RESPONSES.as_prompt(turns)


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": [%s' % (b"1," * SHORT_BYTES),
        b'{"prompt": "%s' % (b"x" * SHORT_BYTES),
        b'{"prompt" "%s"}' % (b"x" * SHORT_BYTES),
        b'{"prompt": "%s"} x' % (b"x" * SHORT_BYTES),
        b'{"prompt": "%s", 5}' % (b"x" * SHORT_BYTES),
        b'{"prompt": %s}' % (b"[" * SHORT_BYTES),
        b"[%s]" % (b"1," * SHORT_BYTES),
        b" " * (SHORT_BYTES + 1),
    ],
)
async def test_what_is_no_object_is_said_to_be_none(content: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        await parse(content)
    answer: Answer = refused.value.answer
    assert answer.status == 400
    assert b"JSON" in answer.body


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"do_remote_decode": True, "transfer_id": "x"}, None),
        ({"registration": "jit", "do_remote_prefill": True}, {"registration": "jit"}),
        (5, None),
        (None, None),
    ],
)
async def test_a_client_cannot_name_transfers(given: Any, kept: Any) -> None:
    """R10."""
    body = await parse(json.dumps({"prompt": "x", "kv_transfer_params": given}).encode())
    assert body.get("kv_transfer_params") == kept
    leg = decode_leg(body, "t", "p", "P", 1, 0.0)["kv_transfer_params"]
    assert (leg["transfer_id"], leg["do_remote_decode"]) == ("t", False)
    assert leg.get("registration") == (kept or {}).get("registration")
    assert "registration" not in prefill_leg(body, "t", "p", CHAT)["kv_transfer_params"]


async def test_a_registration_that_there_is_not_is_refused() -> None:
    with pytest.raises(RefusedError) as refused:
        await parse(b'{"kv_transfer_params": {"registration": "never"}}')
    assert b"allowed: eager, jit, after_prefill, auto" in refused.value.answer.body
