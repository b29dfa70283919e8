"""A prefill engine takes from a decode engine what that has of a prompt, and it lacks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvbus_connector import history
from kvbus_connector.history_giver import HistoryGiver
from kvbus_connector.history_worth import TRY_AGAIN, PrefillSpeed, Worth
from kvbus_connector.steps import Steps
from support.fake_engine import COMPAT, Boot, FakeEngine, Request, legs
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker
from kvbus.wire import Cancel, Heartbeat, Registration, Role, State
from kvbus.wire import decode as decode_message

P_BLOCKS, D_BLOCKS = [1, 2, 3], [10, 11, 12]
HISTORY = 64  # tokens, of 96


@pytest.fixture
def pair(boot: Boot, patient: None) -> tuple[FakeEngine, FakeEngine]:
    compat = (("block_size", "32"), *COMPAT)
    prefill, decode = (boot(name, options={"history": True}, compat=compat) for name in ("P", "D"))
    prefill.decodes_at_once = False
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    return prefill, decode


def turn(name: str = "t") -> tuple[Request, Request]:
    """Both legs of a request of which D may have the beginning."""
    p_leg, d_leg = legs(name)
    assert p_leg.kv_transfer_params is not None
    assert d_leg.kv_transfer_params is not None
    p_leg.kv_transfer_params["history_engine_id"] = "D"
    d_leg.kv_transfer_params["history"] = True
    for leg in (p_leg, d_leg):
        leg.prompt_token_ids = list(range(96))
    p_leg.num_computed_tokens = 0
    return p_leg, d_leg


def allocate(decode: FakeEngine, request: Request, cached_tokens: int = HISTORY) -> None:
    """As vLLM does when it schedules D's leg."""
    decode.arrive(request)
    tokens = decode.scheduler.tokens_from_outside(request, cached_tokens)
    assert tokens == 96 - cached_tokens
    decode.scheduler.allocated(request, [D_BLOCKS[cached_tokens // 32 :]], tokens, [D_BLOCKS])


def offered(prefill: FakeEngine, decode: FakeEngine, request: Request, computed_tokens: int = 0) -> int:
    """What vLLM of P is told, once it is not told to ask again."""
    found: list[int] = []

    def asked() -> bool:
        decode.step()
        tokens = prefill.scheduler.tokens_from_outside(request, computed_tokens)
        found.extend([] if tokens is None else [tokens])
        return bool(found)

    eventually_sync(asked)
    return found[0]


def take(prefill: FakeEngine, request: Request) -> None:
    prefill.scheduler.allocated(request, [P_BLOCKS[:2]], HISTORY, [P_BLOCKS[:2]])


def prefilled(prefill: FakeEngine, request: Request) -> None:
    request.num_computed_tokens = 96
    prefill.scheduler.finished(request, [P_BLOCKS], prefilled=True)


def received(engine: FakeEngine, other: FakeEngine, request: Request) -> bool:
    """Whether vLLM has been told; both engines are stepped."""
    other.step()
    engine.step()
    return request.request_id in engine.received


def test_what_prefill_lacks_comes_from_decode_and_only_the_rest_goes_back(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == HISTORY
    take(prefill, p_leg)
    eventually_sync(lambda: received(prefill, decode, p_leg))
    assert prefill.received[p_leg.request_id] is True
    assert prefill.planes[0].content == {1: "D:10", 2: "D:11"}
    prefilled(prefill, p_leg)
    eventually_sync(lambda: received(decode, prefill, d_leg))
    eventually_sync(lambda: prefill.has_released(p_leg.request_id))
    assert decode.planes[0].content == {12: "P:3"}
    assert prefill.scheduler.node.counters["history_tokens"] == HISTORY


def test_prefill_registers_after_the_steps_that_may_still_write_into_its_blocks(
    pair: tuple[FakeEngine, FakeEngine],
) -> None:
    """vLLM gives a new request the blocks of one that was aborted while the step that fills them runs."""
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == HISTORY
    said: list[Registration] = []
    prefill.scheduler._sink.register = lambda registration, _: said.append(registration)  # type: ignore[method-assign]
    take(prefill, p_leg)
    prefill.step({"another": 100})
    prefill.step()
    assert said == []
    prefill.step()
    assert len(said) == 1


@pytest.mark.parametrize("skips", [True, False])
def test_a_request_for_which_vllm_takes_nothing_is_not_registered(
    pair: tuple[FakeEngine, FakeEngine], skips: bool
) -> None:
    """One with prompt_logprobs reads no cache: vLLM overrules the tokens that it was told of."""
    prefill, decode = pair
    p_leg, d_leg = turn()
    p_leg.skip_reading_prefix_cache = skips  # type: ignore[attr-defined]
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == (0 if skips else HISTORY)
    prefill.scheduler.allocated(p_leg, [P_BLOCKS], 0, [P_BLOCKS])
    assert not prefill.scheduler._awaits(p_leg.request_id)
    assert prefill.step().expect == {}


def test_what_prefill_has_itself_is_not_sent(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg, computed_tokens=32) == 32
    prefill.scheduler.allocated(p_leg, [[2]], 32, [[1, 2]])
    eventually_sync(lambda: received(prefill, decode, p_leg))
    assert prefill.planes[0].content == {2: "D:11"}


@pytest.mark.parametrize("computed_tokens", [64, 80])
def test_where_nothing_is_missing_prefill_computes(pair: tuple[FakeEngine, FakeEngine], computed_tokens: int) -> None:
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg, computed_tokens) == 0
    prefilled(prefill, p_leg)
    eventually_sync(lambda: received(decode, prefill, d_leg))
    assert decode.received[d_leg.request_id] is True


@pytest.mark.parametrize("cached_tokens", [0, None])
def test_without_an_offer_prefill_computes(
    pair: tuple[FakeEngine, FakeEngine], cached_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: decode's leg does not come at all."""
    if cached_tokens is None:
        monkeypatch.setattr(history, "MAX_WAIT_S", 0.05)
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    if cached_tokens is not None:
        allocate(decode, d_leg, cached_tokens)
    assert offered(prefill, decode, p_leg) == 0
    assert not prefill.received


@pytest.mark.parametrize(
    "what", [{"prompt_token_ids": None}, {"mm_features": ["an image"]}, {"prompt_embeds": "a tensor"}]
)
def test_no_history_is_asked_for_that_the_digest_does_not_cover(
    pair: tuple[FakeEngine, FakeEngine], what: dict[str, Any]
) -> None:
    prefill, _ = pair
    for name, more, computes in (("plain", {}, None), ("other", what, 0)):
        leg = turn(name)[0]
        vars(leg).update(more)
        prefill.arrive(leg)
        assert prefill.scheduler.tokens_from_outside(leg, 0) is computes


def test_what_does_not_pay_is_not_waited_for_and_not_held(
    pair: tuple[FakeEngine, FakeEngine], broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P's word overtakes D's offer."""
    monkeypatch.setattr(Worth, "asking", lambda _self, _lacking: False)
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    assert prefill.scheduler.tokens_from_outside(p_leg, 0) == 0
    eventually_sync(lambda: any(isinstance(decode_message(payload), Cancel) for _, payload in list(broker.log)))
    allocate(decode, d_leg)
    eventually_sync(lambda: decode.has_released(d_leg.request_id))


class Lora:
    lora_name = "other"


@pytest.mark.parametrize("what", [{"prompt_token_ids": list(range(1, 97))}, {"lora_request": Lora()}])
def test_another_prompt_or_adapter_is_not_taken(pair: tuple[FakeEngine, FakeEngine], what: dict[str, Any]) -> None:
    """H5: of as many tokens, under the same id."""
    prefill, decode = pair
    p_leg, d_leg = turn()
    vars(p_leg).update(what)
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == HISTORY
    take(prefill, p_leg)
    eventually_sync(lambda: received(prefill, decode, p_leg))
    assert prefill.received[p_leg.request_id] is False, "vLLM asks again, and computes"
    assert prefill.planes[0].content == {}
    assert prefill.scheduler.tokens_from_outside(p_leg, 0) == 0


def test_a_prefill_engine_that_dies_holds_nothing_on_decode(pair: tuple[FakeEngine, FakeEngine], boot: Boot) -> None:
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == HISTORY
    prefill.die()
    eventually_sync(lambda: received(decode, decode, d_leg), 20)
    assert decode.received[d_leg.request_id] is False


def test_a_history_that_is_withdrawn_or_does_not_come_is_computed_soon(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """D's request is aborted after the offer; P has known nothing about its own speed so far."""
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == HISTORY
    decode.scheduler.finished(d_leg, [D_BLOCKS], prefilled=False)
    eventually_sync(lambda: received(decode, decode, d_leg))
    began = time.monotonic()
    take(prefill, p_leg)
    eventually_sync(lambda: received(prefill, decode, p_leg))
    assert prefill.received[p_leg.request_id] is False
    assert time.monotonic() - began < 1
    assert prefill.scheduler.node.counters["history: lost"] == 1


def test_a_history_is_withdrawn_also_while_the_bus_is_away(pair: tuple[FakeEngine, FakeEngine]) -> None:
    prefill, decode = pair
    p_leg, d_leg = turn()
    prefill.arrive(p_leg)
    allocate(decode, d_leg)
    assert offered(prefill, decode, p_leg) == HISTORY
    decode.die()
    decode.scheduler.finished(d_leg, [D_BLOCKS], prefilled=False)
    eventually_sync(lambda: received(decode, decode, d_leg), 20)
    assert decode.received[d_leg.request_id] is False


def plan(giver: HistoryGiver, steps: Steps, *, busy: bool) -> bool:
    """As the scheduler half does in each step."""
    steps.plan(busy)
    return giver.plan()


class Said:
    """In the place of :class:`Outgoing`: what decode says of its history."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.withdrawn: list[str] = []

    def announce_history(self, _request: Any, _name: str, _tokens: int) -> None:
        pass

    def offer_history(self, _request: Any, name: str, _blocks: Any, _tokens: int) -> None:
        self.offered.append(name)

    def withdraw(self, name: str) -> None:
        self.withdrawn.append(name)


@pytest.mark.parametrize("failed", [False, True])
def test_decode_does_not_start_before_its_history_is_let_go(failed: bool) -> None:
    """One that runs may be preempted, and then vLLM takes its blocks without asking."""
    said, own = Said(), Heartbeat("D", 1, 1, Role.DECODE, State.READY, 1, "m", history=True)
    giver = HistoryGiver(own, said, 32, steps := Steps())  # type: ignore[arg-type]
    request = turn()[1]
    giver.offer(request, [D_BLOCKS], HISTORY)
    plan(giver, steps, busy=False)
    assert said.offered == ["t~history"]
    received, lost, sent = {request.request_id, "other"}, {request.request_id} if failed else set(), {"third"}
    giver.admit(received, lost, sent)
    assert (received, lost, sent) == ({"other"}, set(), {"third"})
    eventually_sync(lambda: plan(giver, steps, busy=False) or len(said.withdrawn) >= 3)
    assert set(said.withdrawn) == {"t~history"}, "the prefill engine may be gone; a word may be lost, or come too early"
    received, lost, sent = set(), set(), {request.request_id}
    giver.admit(received, lost, sent)
    assert (received, lost, sent) == ({request.request_id}, {request.request_id} if failed else set(), set())


@pytest.mark.parametrize(
    ("steps", "said_in"),
    [("i", 0), ("b bbb", 2), ("bii i", 0), ("i bbb", 2), ("b iiii", 1), ("ii bi", 2), ("bii bb", 2)],
)
def test_blocks_are_not_written_before_the_steps_that_may_compute_them_have_ended(steps: str, said_in: int) -> None:
    """vLLM puts a block into its cache when it plans the step that computes it, and plans one step ahead.

    Args:
        steps: busy or idle ones before the offer, and from the step of the offer on.
        said_in: in which step after the offer's.
    """
    said, own = Said(), Heartbeat("D", 1, 1, Role.DECODE, State.READY, 1, "m", history=True)
    giver = HistoryGiver(own, said, 32, counted := Steps())  # type: ignore[arg-type]
    before, _, after = steps.rpartition(" ")
    for step in before:
        plan(giver, counted, busy=step == "b")
    giver.offer(turn()[1], [D_BLOCKS], HISTORY)
    for number, step in enumerate(after.ljust(4, "i")):
        waits = plan(giver, counted, busy=step == "b")
        assert bool(said.offered) is (number >= said_in)
        assert waits is (number < said_in)


def test_a_history_is_offered_once_also_if_another_prefill_engine_takes_over() -> None:
    """The ranks have let it go by then, so nothing would ever end a second offer."""
    said, own = Said(), Heartbeat("D", 1, 1, Role.DECODE, State.READY, 1, "m", history=True)
    giver = HistoryGiver(own, said, 32, steps := Steps())  # type: ignore[arg-type]
    request = turn()[1]
    giver.offer(request, [D_BLOCKS], HISTORY)
    plan(giver, steps, busy=False)
    received, failed = {request.request_id}, {request.request_id}
    giver.admit(received, failed, {request.request_id})
    assert received == failed == {request.request_id}
    giver.offer(request, [D_BLOCKS], HISTORY)
    plan(giver, steps, busy=False)
    assert said.offered == ["t~history"]
    received = {request.request_id}
    giver.admit(received, set(), set())
    assert received == {request.request_id}


def test_what_was_let_go_in_time_is_not_held_back() -> None:
    said, own = Said(), Heartbeat("D", 1, 1, Role.DECODE, State.READY, 1, "m", history=True)
    giver = HistoryGiver(own, said, 32, Steps())  # type: ignore[arg-type]
    request = turn()[1]
    giver.offer(request, [D_BLOCKS], HISTORY)
    received, sent = {request.request_id}, {request.request_id}
    giver.admit(received, set(), sent)
    assert (received, sent) == ({request.request_id}, set())


def test_an_offer_is_waited_for_as_long_as_computing_would_take() -> None:
    speed = PrefillSpeed()
    assert speed.takes_s(100, 0.005, 0.05) == 0.05, "not known"
    for at in range(20):
        speed.begin_step(200, at)
        speed.end_step(at + 0.02)
    assert speed.tokens_per_s == pytest.approx(10_000)
    assert [speed.takes_s(tokens, 0.005, 0.05) for tokens in (10, 200, 9999)] == pytest.approx([0.005, 0.02, 0.05])
    speed.begin_step(3, 30)
    speed.end_step(31)
    assert speed.tokens_per_s == pytest.approx(10_000), "a step of a few tokens tells nothing"


def test_the_speed_is_that_of_large_steps_also_when_the_next_one_is_planned_before_their_end() -> None:
    speed = PrefillSpeed()
    for at in range(8):
        speed.begin_step(200, at)
        speed.begin_step(at % 2, at + 0.001)
        speed.end_step(at + 0.02)
        speed.end_step(at + 0.021)
    assert speed.tokens_per_s == pytest.approx(10_000)
    speed.begin_step(200, 10)
    speed.end_step(10.0001)
    assert speed.tokens_per_s == pytest.approx(10_000), "of another step"


def at_speed(tokens_per_s: float) -> PrefillSpeed:
    speed = PrefillSpeed()
    speed.begin_step(1000, 0)
    speed.end_step(1000 / tokens_per_s)
    return speed


def test_a_history_is_asked_for_while_it_saves_more_than_it_costs() -> None:
    worth = Worth(at_speed(10_000))
    assert worth.asking(10), "nothing is known"
    for _ in range(8):
        worth.learn(lacking=200, came=50, took_s=0.01, received_s=0.004)  # 5 ms saved by 10 ms
    assert not worth.asking(200)
    assert worth.asking(400), "a fourth of it takes 10 ms"
    assert not worth.taking(39), "3.9 ms by 4"
    assert worth.taking(40)


def test_one_slow_history_changes_nothing() -> None:
    worth = Worth(at_speed(10_000))
    for took_s in (0.005, 2.0, 0.005):
        worth.learn(lacking=200, came=200, took_s=took_s, received_s=took_s)
    assert worth.asking(200)
    assert worth.taking(100)


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    worth = Worth(at_speed(10_000))
    worth.learn(lacking=200, came=0, took_s=0.01)
    assert [worth.asking(200) for _ in range(2 * TRY_AGAIN)].count(True) == 2


def test_at_a_speed_that_is_not_known_all_is_asked_for() -> None:
    worth = Worth(PrefillSpeed())
    worth.learn(lacking=200, came=0, took_s=1.0)
    assert worth.asking(1)
