from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvbus_connector.compat import VllmMismatchError, check_internals, check_version, check_vllm_config
from kvbus_connector.identity import (
    TransferName,
    data_parallel_of,
    digest_of,
    incarnation_of,
    name_transfer,
)

from kvbus.errors import ConfigError
from kvbus.router.request import CHAT
from kvbus.router.request.leg_bodies import transfers_of


@pytest.mark.parametrize(
    ("request_id", "given", "name"),
    [
        ("chatcmpl-x-0123abcd", None, TransferName("chatcmpl-x", "chatcmpl-x")),
        ("cmpl-x-0-0123abcd", None, TransferName("cmpl-x", "cmpl-x")),
        ("cmpl-x-3-0123abcd", None, TransferName("cmpl-x", "cmpl-x#0.3")),
        ("2_chatcmpl-x-0123abcd", None, TransferName("chatcmpl-x", "chatcmpl-x#2.0")),
        ("1_cmpl-x-2-0123abcd", "t", TransferName("t", "t#1.2")),
        ("cmpl-x-0-0123abcd", "t", TransferName("t", "t")),
        ("whatever", "t", TransferName("t", "t")),
        ("whatever", None, TransferName("whatever", "whatever")),
        ("a\nb-0123abcd", None, TransferName("a\nb", "a\nb")),
    ],
)
def test_both_engines_call_a_request_the_same(request_id: str, given: str | None, name: TransferName) -> None:
    assert name_transfer(request_id, {"transfer_id": given}) == name


@pytest.mark.parametrize(
    ("body", "request_ids"),
    [
        ({"prompt": "a"}, ["cmpl-t-0-0123abcd"]),
        ({"prompt": [5, 6]}, ["cmpl-t-0-0123abcd"]),
        ({"prompt": [[5], [6]]}, ["cmpl-t-0-0123abcd", "cmpl-t-1-0123abcd"]),
        ({"messages": [], "n": 2}, ["0_chatcmpl-t-0123abcd", "1_chatcmpl-t-0123abcd"]),
        ({"prompt": ["a", "b"], "n": 2}, [f"{s}_cmpl-t-{p}-0123abcd" for s in (0, 1) for p in (0, 1)]),
        ({"prompt": [], "n": "two"}, ["cmpl-t-0-0123abcd"]),
    ],
)
def test_the_router_calls_them_the_same_too(body: dict[str, Any], request_ids: list[str]) -> None:
    names = [name_transfer(request_id, {"transfer_id": "t"}).transfer_id for request_id in request_ids]
    assert transfers_of(body, "t", CHAT) == names


def test_ids_that_share_a_base_are_told_apart_when_an_id_is_given() -> None:
    """A5."""
    one = name_transfer("cmpl-x-0-aaaaaaaa", {"transfer_id": "t1"})
    two = name_transfer("cmpl-x-0-bbbbbbbb", {"transfer_id": "t2"})
    assert one.transfer_id != two.transfer_id


@pytest.mark.parametrize("given", [5, "", None, ["t"]])
def test_a_transfer_id_that_is_no_text_is_none(given: Any) -> None:
    assert name_transfer("chatcmpl-x-0123abcd", {"transfer_id": given}).transfer_id == "chatcmpl-x"


def asked(tokens: list[int] | None, lora: str | None = None) -> Any:
    return SimpleNamespace(prompt_token_ids=tokens, lora_request=lora and SimpleNamespace(lora_name=lora))


def test_kv_of_one_adapter_is_not_taken_for_anothers() -> None:
    """R4: the digest that both engines must agree on covers the adapter's name."""
    digests = [digest_of(asked(tokens, lora), 3) for tokens in ([1, 2, 3], None) for lora in (None, "a", "b")]
    assert len(set(digests)) == len(digests)
    assert digests[3] == "", "an embedded prompt of the base model has nothing to compare"
    assert digest_of(asked([1, 2, 3, 4], "a"), 3) == digests[1], "of the tokens that are sent only"
    assert digest_of(SimpleNamespace(prompt_token_ids=[1, 2, 3]), 3) == digests[0]


def test_every_instance_id_gives_an_incarnation() -> None:
    """R17: under Ray it has the data parallel rank behind it."""
    now = "1764590000123456789"
    assert incarnation_of(now) == incarnation_of(f"{now}_dp3") == int(now)
    for odd in ("", "a1b2c", "99999999999999999999", f"{now}_dpx", "١٢"):
        assert 0 <= incarnation_of(odd) < 1 << 63
        assert incarnation_of(odd) == incarnation_of(odd)
    assert incarnation_of("a") != incarnation_of("b")


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, (False, 0)),
        ({"data_parallel_size": 2, "elastic_ep_max_dp_size": 2, "data_parallel_index": 1}, (True, 1)),
        ({"elastic_ep_max_dp_size": 4, "data_parallel_index": 3}, (True, 3)),
        ({"elastic_ep_max_dp_size": 4, "data_parallel_index": 3, "data_parallel_external_lb": True}, (False, 0)),
        (
            {
                "elastic_ep_max_dp_size": 4,
                "data_parallel_index": 3,
                "data_parallel_rank_local": 1,
                "data_parallel_hybrid_lb": True,
            },
            (True, 1),
        ),
    ],
)
def test_a_data_parallel_rank_says_how_it_is_reached(changes: dict[str, Any], shared: tuple[bool, int]) -> None:
    """R17: of a dense model, of one with experts; behind balancers of the user's own."""
    parallel = {
        "data_parallel_size": 1,
        "elastic_ep_max_dp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_rank_local": 0,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
    }
    assert data_parallel_of(SimpleNamespace(**parallel | changes)) == shared


def test_another_vllm_is_refused_with_both_versions() -> None:
    check_version("0.32.0+cpu")
    for other in ("0.31.2", "0.33.0", "1.32.0", "dev"):
        with pytest.raises(VllmMismatchError, match=f"is {other}; this kvbus works with vLLM 0.32"):
            check_version(other)


def test_a_missing_internal_is_named() -> None:
    check_internals("0.32.9", {"owner": (SimpleNamespace(there=1), ("there",))})
    with pytest.raises(VllmMismatchError, match=r"is 0\.32\.9 and lacks owner\.gone; this kvbus works"):
        check_internals("0.32.9", {"owner": (SimpleNamespace(there=1), ("there", "gone"))})


def vllm_config(**changes: Any) -> Any:
    parallel = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    transfer = {"kv_buffer_device": "cuda", "enable_permute_local_kv": False}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **{k: v for k, v in changes.items() if k in parallel}}),
        kv_transfer_config=SimpleNamespace(**{**transfer, **{k: v for k, v in changes.items() if k in transfer}}),
        device_config=SimpleNamespace(device_type="cuda"),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("pipeline_parallel_size", 2), ("kv_buffer_device", "cpu"), ("enable_permute_local_kv", True)],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: object) -> None:
    check_vllm_config(vllm_config())
    with pytest.raises(ConfigError, match=key) as caught:
        check_vllm_config(vllm_config(**{key: value}))
    assert caught.value.value == value
