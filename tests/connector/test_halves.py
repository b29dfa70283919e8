"""The connector's two halves against the bus, without vLLM: what vLLM is told, when, and how often."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from support.fake_engine import Boot, FakeEngine, Request, legs, restarted
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker
from kvbus.engine.memory_transport import Fabric
from kvbus.wire import TransferStarted
from kvbus.wire import decode as decode_message

P_BLOCKS, D_BLOCKS = [1, 2, 3], [10, 11, 12]
KV = {10: "P:1", 11: "P:2", 12: "P:3"}


def done(decode: FakeEngine, d_leg: Request, prefill: FakeEngine, p_leg: Request) -> bool:
    """Whether both engines are through; both are stepped."""
    return all((decode.has_received(d_leg.request_id), prefill.has_released(p_leg.request_id)))


def test_registration_first(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    assert decode.allocate(d_leg, D_BLOCKS) == 96
    decode.step()
    assert prefill.prefill(p_leg, P_BLOCKS) is not None
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))
    assert decode.received[d_leg.request_id] is True
    assert decode.planes[0].content == KV
    assert decode.allocate(d_leg, []) == 0, "vLLM asks again after the receive"


def test_completion_first(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    prefill.prefill(p_leg, P_BLOCKS)
    prefill.step()
    decode.allocate(d_leg, D_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.planes[0].content == KV


def test_the_completion_arrives_even_if_the_bus_loses_it(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker
) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    with broker.dropping("kvbus.v1.default.prefill.*"):
        prefill.prefill(p_leg, P_BLOCKS)
        eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is True


def test_the_receive_ends_even_if_the_bus_loses_all_word_of_it(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker
) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    with broker.dropping("kvbus.v1.default.done.*"), broker.dropping("kvbus.v1.default.ack.*"):
        decode.allocate(d_leg, D_BLOCKS)
        prefill.prefill(p_leg, P_BLOCKS)
        eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is True


def test_a_partial_hit_gets_the_last_blocks(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """K1: P has three blocks, D misses only the last two."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    assert decode.allocate(d_leg, [20, 21], cached_tokens=32) == 64
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    assert decode.planes[0].content == {20: "P:2", 21: "P:3"}


def test_a_sequential_router_that_knows_nothing_of_kvbus(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg = Request("chatcmpl-x-aaaaaaaa", {"do_remote_decode": True})
    params = prefill.prefill(p_leg, P_BLOCKS)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "chatcmpl-x",
        "prefill_engine_id": "P",
    }
    d_leg = Request("chatcmpl-x-bbbbbbbb", params)
    decode.allocate(d_leg, D_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))


@pytest.mark.parametrize("decode_first", [True, False])
def test_without_a_hint_the_engine_that_has_the_transfer_claims_it(boot: Boot, decode_first: bool) -> None:
    prefill, other, decode = boot("P"), boot("Q"), boot("D")
    eventually_sync(lambda: decode.knows(prefill) and decode.knows(other))
    p_leg, d_leg = legs(hint=None)
    if decode_first:
        decode.allocate(d_leg, D_BLOCKS)
        prefill.prefill(p_leg, P_BLOCKS)
    else:
        prefill.prefill(p_leg, P_BLOCKS)
        decode.allocate(d_leg, D_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.planes[0].content == KV


def test_samples_and_prompts_of_one_call_are_told_apart(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """A3: n=2, two prompts: four requests share one transfer id."""
    prefill, decode = pair
    pairs = []
    for number, (sample, prompt) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        p_leg, d_leg = legs("same")
        p_leg.request_id = f"{sample}_cmpl-same-{prompt}-aaaaaaa{number}"
        d_leg.request_id = f"{sample}_cmpl-same-{prompt}-bbbbbbb{number}"
        prefill.prefill(p_leg, [1 + number])
        decode.allocate(d_leg, [10 + number])
        pairs.append((p_leg, d_leg))
    for p_leg, d_leg in pairs:
        eventually_sync(lambda p=p_leg, d=d_leg: done(decode, d, prefill, p))
    assert decode.planes[0].content == {10: "P:1", 11: "P:2", 12: "P:3", 13: "P:4"}


def test_two_ranks_each_send_to_their_own(boot: Boot) -> None:
    prefill, decode = boot("P", ranks=2), boot("D", ranks=2)
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert [plane.content for plane in decode.planes] == [KV, KV]


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 2), (2, 1)])
def test_unequal_ranks(boot: Boot, p_ranks: int, d_ranks: int) -> None:
    """K5: one writer for two ranks, and two writers for one."""
    prefill, decode = boot("P", ranks=p_ranks), boot("D", ranks=d_ranks)
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert all(plane.content == KV for plane in decode.planes)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_one_rank_cannot_write(boot: Boot, failing_rank: int) -> None:
    """K4, K7: D is told, once, when both ranks are through."""
    prefill, decode = boot("P", ranks=2), boot("D", ranks=2)
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    prefill.planes[failing_rank].fail_next = "post"
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is False


def test_an_aborted_prefill_fails_the_receive(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    assert prefill.prefill(p_leg, P_BLOCKS, well=False) is None
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    assert decode.received[d_leg.request_id] is False


def test_an_aborted_decode_is_reported_so_that_vllm_frees(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """A1, A7."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    assert decode.scheduler.finished(d_leg, [D_BLOCKS], prefilled=False) == (False, None)
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))
    assert decode.planes[0].content == {}


def is_posted(broker: MemoryBroker) -> bool:
    """Whether a prefill engine has said that a WRITE was posted."""
    return any(isinstance(decode_message(payload), TransferStarted) for _, payload in list(broker.log))


def test_an_abort_under_a_slow_write_waits_for_its_end(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, fabric: Fabric
) -> None:
    """K3: the blocks are not given back while they may still be written."""
    prefill, decode = pair
    fabric.slow = True
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: is_posted(broker))
    decode.scheduler.finished(d_leg, [D_BLOCKS], prefilled=False)
    for _ in range(50):
        assert not decode.has_received(d_leg.request_id)
    fabric.slow = False
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))


def test_a_decode_request_that_never_ran_frees_the_prefill(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """A2."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    prefill.prefill(p_leg, P_BLOCKS)
    decode.arrive(d_leg)
    decode.scheduler.finished(d_leg, [], prefilled=False)
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))


def test_a_fully_cached_prompt_frees_the_prefill(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = legs()
    prefill.prefill(p_leg, P_BLOCKS)
    assert decode.allocate(d_leg, [], cached_tokens=96) == 0
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))


def test_other_requests_are_left_alone(pair: tuple[FakeEngine, FakeEngine]) -> None:
    _, decode = pair
    request = Request("r", None)
    decode.scheduler.arrived(request)
    assert decode.allocate(request, D_BLOCKS) == 0
    assert not decode.step()
    assert decode.scheduler.finished(request, [D_BLOCKS], prefilled=True) == (False, None)


class TestComputedLocally:
    """Loudly, and the request is served."""

    def expect(self, decode: FakeEngine, caplog: pytest.LogCaptureFixture, hint: str | None, reason: str) -> None:
        _, d_leg = legs(hint=hint)
        with caplog.at_level(logging.WARNING, "kvbus_connector"):
            assert decode.allocate(d_leg, D_BLOCKS) == 0
        assert f"expected remote KV, computed locally: {reason}" in caplog.text
        assert decode.scheduler.node.counters["computed_locally"] == 1

    def test_bus_away(
        self, pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, caplog: pytest.LogCaptureFixture
    ) -> None:
        with broker.down():
            self.expect(pair[1], caplog, "P", "the bus is not connected")

    def test_unknown_prefill_engine(
        self, pair: tuple[FakeEngine, FakeEngine], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.expect(pair[1], caplog, "X", "prefill engine X is not on the bus")

    def test_no_prefill_engine(self, boot: Boot, caplog: pytest.LogCaptureFixture) -> None:
        decode = boot("D")
        eventually_sync(lambda: decode.scheduler.node.bus.connected)
        self.expect(decode, caplog, None, "no prefill engine is on the bus")

    def test_unfit_prefill_engine(self, boot: Boot, caplog: pytest.LogCaptureFixture) -> None:
        """H2."""
        prefill, decode = boot("P", compat=(("dtype", "float32"), ("model", "m"))), boot("D")
        eventually_sync(lambda: decode.knows(prefill))
        reason = "prefill engine P does not fit: dtype: bfloat16 here, float32 on P"
        self.expect(decode, caplog, "P", reason)

    def test_a_hint_that_is_no_engine_id(
        self, pair: tuple[FakeEngine, FakeEngine], caplog: pytest.LogCaptureFixture
    ) -> None:
        """H5: nothing from a request gets into a subject unchecked."""
        prefill, decode = pair
        for hint in (">", "a b", "a.b", "", 7):
            p_leg, d_leg = legs(f"hint-{hint!r}", hint=hint)  # type: ignore[arg-type]
            decode.allocate(d_leg, D_BLOCKS)
            prefill.prefill(p_leg, P_BLOCKS)
            eventually_sync(lambda d=d_leg: decode.has_received(d.request_id))

    def test_registration_too_large(
        self, pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, caplog: pytest.LogCaptureFixture
    ) -> None:
        """H6: vLLM already waits for the receive, so it is told that it has failed."""
        _, decode = pair
        broker.max_payload = 300
        _, d_leg = legs()
        with caplog.at_level(logging.WARNING, "kvbus_connector"):
            decode.allocate(d_leg, list(range(1, 160, 2)))
        assert "max_payload=300" in caplog.text
        eventually_sync(lambda: decode.has_received(d_leg.request_id))
        assert decode.received[d_leg.request_id] is False


@pytest.mark.slow
def test_a_restarted_decode_engine_is_met_anew(boot: Boot, broker: MemoryBroker) -> None:
    """C3."""
    prefill, decode = boot("P"), boot("D")
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    decode.die()
    again = restarted(decode)
    try:
        eventually_sync(lambda: again.knows(prefill))
        p_leg, d_leg = legs()
        again.allocate(d_leg, D_BLOCKS)
        prefill.prefill(p_leg, P_BLOCKS)
        eventually_sync(lambda: again.has_received(d_leg.request_id))
        assert again.planes[0].content == KV
    finally:
        again.close()


def test_a_wrong_prompt_is_not_written(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """H5: the same transfer id, another prompt."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    p_leg.num_computed_tokens = 95
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is False
    assert decode.planes[0].content == {}


def test_another_prompt_of_the_same_length_is_not_written(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """H5: a router that mixes two requests up."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    p_leg.prompt_token_ids, d_leg.prompt_token_ids = list(range(96)), [*range(95), 7]
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is False
    assert decode.planes[0].content == {}


def test_block_ids_out_of_range_are_not_written(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """F6, H5."""
    prefill, decode = pair
    p_leg, d_leg = legs()
    decode.allocate(d_leg, [10, 11, 64])
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is False
    assert decode.planes[0].content == {}


def test_the_lease_frees_what_nobody_fetches(boot: Boot) -> None:
    prefill = boot("P", options={"block_lease_s": 0.2})
    p_leg, _ = legs()
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))


@pytest.mark.slow
def test_what_waits_in_decodes_queue_is_kept(boot: Boot) -> None:
    """L1: the lease is renewed by a thread that does not depend on steps, until decode has blocks for it."""
    options = {"block_lease_s": 4.0}  # two thirds of it may be lost to a busy machine
    prefill, decode = boot("P", options=options), boot("D", options=options)
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    p_leg, d_leg = legs()
    decode.scheduler.arrived(d_leg)
    prefill.prefill(p_leg, P_BLOCKS)
    later = time.monotonic() + 5.5
    while time.monotonic() < later:
        assert not prefill.has_released(p_leg.request_id)
        time.sleep(0.02)  # the threads that renew it share the interpreter with this loop
    decode.allocate(d_leg, D_BLOCKS)
    eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
    assert decode.received[d_leg.request_id] is True


def test_an_engine_that_leaves_tells_whoever_waits(boot: Boot) -> None:
    """C5."""
    prefill, decode = boot("P"), boot("D")
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    _, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    eventually_sync(lambda: prefill.workers[0].waiting == 1)
    prefill.close()
    eventually_sync(lambda: decode.has_received(d_leg.request_id))
    assert decode.received[d_leg.request_id] is False


@pytest.mark.slow
def test_a_dead_prefill_engine_is_fenced_and_decode_goes_on(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, fabric: Fabric
) -> None:
    """C1, C2: as kill -9. The blocks come back when the write lease has run out, and not before."""
    prefill, decode = pair
    fabric.slow = True
    p_leg, d_leg = legs()
    decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    eventually_sync(lambda: is_posted(broker))
    died = time.monotonic()
    prefill.die()
    eventually_sync(lambda: decode.has_received(d_leg.request_id), timeout_s=20)
    assert decode.received[d_leg.request_id] is False
    assert time.monotonic() - died > 3.0


@pytest.mark.parametrize("params", ["x", ["do_remote_decode"], 5, True])
def test_parameters_that_are_no_map_take_no_engine_down(pair: tuple[FakeEngine, FakeEngine], params: Any) -> None:
    """vLLM hands on what stands under that name among a client's own arguments."""
    for engine in pair:
        leg = Request("cmpl-a-0-aaaaaaaa", params)
        engine.scheduler.arrived(leg)
        assert engine.scheduler.tokens_from_outside(leg, 0) == 0
        assert engine.scheduler.finished(leg, [D_BLOCKS], prefilled=True) == (False, None)


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("p_id", "d_id", "params"),
    [
        (LONG, LONG, {}),
        ("cmpl-a-0-aaaaaaaa", "cmpl-a-0-bbbbbbbb", {"transfer_id": LONG}),
        ("cmpl-a-0-aaaaaaaa", "cmpl-a-0-bbbbbbbb", {"transfer_id": "t", "attempt": 1 << 70}),
        ("cmpl-a-0-aaaaaaaa", "cmpl-a-0-bbbbbbbb", {"transfer_id": "t", "attempt": 10**12, "takeover_s": float("nan")}),
    ],
    ids=["request id", "transfer id", "attempt", "another attempt"],
)
def test_what_a_client_may_choose_takes_no_engine_down(
    pair: tuple[FakeEngine, FakeEngine], p_id: str, d_id: str, params: dict[str, Any]
) -> None:
    """vLLM does not catch what its hooks raise: the engine would be gone, and the next one after it."""
    prefill, decode = pair
    p_leg = Request(p_id, {"do_remote_decode": True, **params})
    d_leg = Request(d_id, {"do_remote_prefill": True, "prefill_engine_id": "P", **params})
    tokens = decode.allocate(d_leg, D_BLOCKS)
    prefill.prefill(p_leg, P_BLOCKS)
    if tokens:
        eventually_sync(lambda: done(decode, d_leg, prefill, p_leg))
        assert decode.received[d_leg.request_id] is True
    else:
        assert p_id == LONG, "computed on decode, and prefill keeps nothing"
    decode.scheduler.finished(d_leg, [D_BLOCKS], prefilled=True)
