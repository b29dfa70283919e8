"""Taking over: a request's way through engines that are lost, one event at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from kvbus.router.fleet import Key, key_of
from kvbus.router.fleet.policy import fit
from kvbus.router.http import Answer
from kvbus.router.request import Failover
from kvbus.router.request.failover_events import (
    AskRebind,
    AwaitVerdict,
    ClientLeft,
    Effect,
    EngineLeft,
    Event,
    Fail,
    PassOn,
    RebindAnswered,
    Refuse,
    Release,
    SendDecode,
    SendPrefill,
    SinkAnswered,
    SinkComputes,
    SinkLost,
    SourceAnswered,
    SourceLost,
    SourceRefused,
    TookOver,
    TransferLost,
    VerdictDue,
)
from kvbus.wire import Heartbeat, Role, State

P = Heartbeat("P", 1, 1, Role.PREFILL, State.READY, 1, "m", "h:1")
Q, R = replace(P, engine="Q"), replace(P, engine="R")
D = replace(P, engine="D", role=Role.DECODE)
E, F = replace(D, engine="E"), replace(D, engine="F")
NO = Answer(400, b"too long")


class Engines:
    """Takes the first that fits."""

    def __init__(self, *engines: Heartbeat) -> None:
        self.engines = list(engines)

    def source(self, sink: Heartbeat | None, without: Collection[Key]) -> Heartbeat | None:
        found = (
            each
            for each in self.engines
            if each.role.prefills and key_of(each) not in without and (sink is None or fit(each, sink))
        )
        return next(found, None)

    def sink(self, source: Heartbeat | None, without: Collection[Key]) -> Heartbeat | None:
        found = (
            each
            for each in self.engines
            if each.role.decodes and key_of(each) not in without and (source is None or fit(source, each))
        )
        return next(found, None)


ALL = Engines(P, Q, R, D, E, F)
PAIR = Engines(P, D)


def begun(engines: Engines = ALL, **limits: int) -> Failover:
    failover = Failover(P, D, **{"max_takeovers": 3, **limits}, takeover_s=5.0)
    waits_s = 5.0 if engines is ALL else 0.0
    assert failover.begin(engines) == [SendPrefill(P, 1), SendDecode(D, P, 1, waits_s)]
    return failover


def test_nothing_is_lost() -> None:
    failover = begun()
    assert failover.apply(SourceAnswered(1), ALL) == []
    assert failover.apply(SinkAnswered(1, 200), ALL) == [PassOn()]
    assert failover.over
    for late in (SinkLost(1, "x"), SourceLost(1, "x"), EngineLeft("D", 1, "x"), VerdictDue()):
        assert failover.apply(late, ALL) == [], "nothing is sent twice once a token is out"


@pytest.mark.parametrize("how", ["refused", "left"])
def test_a_lost_prefill_engine_is_replaced_when_decode_agrees(how: str) -> None:
    failover = begun()
    lost: Event = SourceLost(1, "gone") if how == "refused" else EngineLeft("P", 1, "gone")
    assert failover.apply(lost, ALL) == [
        Release(P, D, 1),
        AskRebind(D, Q, 2),
    ]
    assert failover.apply(lost, ALL) == [], "both may be said"
    assert failover.apply(RebindAnswered(1, ""), ALL) == []
    assert failover.apply(RebindAnswered(2, ""), ALL) == [
        TookOver("prefill", "P", "Q", 2, "gone"),
        SendPrefill(Q, 2),
    ]
    assert failover.apply(SourceAnswered(2), ALL) == []
    assert failover.apply(SinkAnswered(1, 200), ALL) == [PassOn()], "the decode leg is the first one still"


def test_a_prefill_engine_that_lives_may_say_itself_that_there_will_be_no_kv() -> None:
    failover = begun()
    failover.apply(SourceAnswered(1), ALL)
    for other in (TransferLost("Q", 1, "x"), TransferLost("P", 2, "x")):
        assert failover.apply(other, ALL) == []
    assert AskRebind(D, Q, 2) in failover.apply(TransferLost("P", 1, "the WRITE failed"), ALL)
    assert failover.apply(TransferLost("P", 1, "of the other rank"), ALL) == []


@pytest.mark.parametrize("engines", [ALL, Engines(P, D, E)], ids=["others", "no other prefill"])
def test_a_write_that_failed_with_its_decode_engine_loses_no_kv(engines: Engines) -> None:
    """Prefill says first that the WRITE failed, and only then one learns that it was decode's end."""
    failover = Failover(P, D, 3, 5.0)
    failover.begin(engines)
    failover.apply(SourceAnswered(1), engines)
    assert not any(isinstance(each, Release) for each in failover.apply(TransferLost("P", 1, "disconnected"), engines))
    effects = failover.apply(EngineLeft("D", 1, "silent"), engines)
    assert [type(each) for each in effects] == [TookOver, SendDecode], "no second prefill"
    assert isinstance(effects[1], SendDecode)
    assert (effects[1].sink, effects[1].source) == (E, P)


def test_the_same_when_the_bus_is_faster_than_the_answer_to_the_prefill_leg() -> None:
    flight = begun()
    lost = TransferLost("P", 1, "disconnected", kept=True)
    assert flight.apply(lost, ALL) == [AskRebind(D, Q, 2)], "no Release: the KV is still wanted"
    assert flight.apply(SourceAnswered(1), ALL) == []
    effects = flight.apply(SinkLost(1, "gone"), ALL)
    assert [type(each) for each in effects] == [TookOver, SendDecode], "no second prefill"
    assert isinstance(effects[1], SendDecode)
    assert (effects[1].sink, effects[1].source) == (E, P)


def test_a_decode_engine_that_nobody_can_take_over_from_is_not_given_up_for_its_silence() -> None:
    failover = begun(PAIR)
    assert failover.apply(EngineLeft("D", 1, "silent"), PAIR) == []
    assert failover.apply(SinkAnswered(1, 200), PAIR) == [PassOn()]


def test_where_decode_has_the_kv_nothing_more_is_done() -> None:
    failover = begun()
    failover.apply(SourceAnswered(1), ALL)
    assert AskRebind(D, Q, 2) in failover.apply(EngineLeft("P", 1, "gone"), ALL)
    assert failover.apply(RebindAnswered(2, "its KV is here"), ALL) == []
    assert failover.source is None
    assert failover.apply(SinkAnswered(1, 200), ALL) == [PassOn()]


def test_without_another_prefill_engine_decode_computes_it() -> None:
    failover = begun(PAIR)
    assert failover.apply(SourceLost(1, "gone"), PAIR) == [
        Release(P, D, 1),
        TookOver("prefill", "P", "D", 1, "gone"),
        AskRebind(D, None, 2),
    ], "it may be acknowledged, and wait for one that lives and will not do it"
    assert failover.apply(SinkAnswered(1, 200), PAIR) == [PassOn()]


def test_a_decode_engine_that_waits_in_vain_is_told() -> None:
    failover = begun()
    assert failover.apply(SourceLost(1, "gone"), PAIR) == [
        Release(P, D, 1),
        TookOver("prefill", "P", "D", 1, "gone"),
        AskRebind(D, None, 2),
    ]
    assert failover.apply(RebindAnswered(2, ""), PAIR) == []


def test_the_next_prefill_engine_may_be_lost_too_before_decode_has_agreed() -> None:
    failover = begun()
    failover.apply(SourceLost(1, "gone"), ALL)
    assert AskRebind(D, R, 3) in failover.apply(EngineLeft("Q", 1, "gone"), ALL)
    assert failover.apply(RebindAnswered(2, ""), ALL) == []
    assert SendPrefill(R, 3) in failover.apply(RebindAnswered(3, ""), ALL)


@pytest.mark.parametrize("done", [False, True])
def test_a_lost_decode_engine_is_replaced_without_a_second_prefill(done: bool) -> None:
    failover = begun()
    if done:
        failover.apply(SourceAnswered(1), ALL)
    waits_s = 0.0 if done else 5.0
    assert failover.apply(SinkLost(1, "reset"), ALL) == [
        TookOver("decode", "D", "E", 2, "reset"),
        SendDecode(E, P, 2, waits_s),
    ]
    assert failover.apply(SinkAnswered(1, 200), ALL) == [], "of the old leg"
    assert failover.apply(SourceAnswered(1), ALL) == [], "of the only prefill leg"
    assert failover.apply(ClientLeft(), ALL) == [Release(P, E, 2)], "the right attempt is named"


def test_both_are_lost() -> None:
    failover = begun()
    failover.apply(SourceLost(1, "gone"), ALL)
    assert failover.apply(EngineLeft("D", 1, "gone"), ALL) == [
        TookOver("decode", "D", "E", 3, "gone"),
        SendPrefill(Q, 3),
        SendDecode(E, Q, 3, 5.0),
    ]
    assert failover.apply(RebindAnswered(2, ""), ALL) == []
    assert failover.apply(SourceAnswered(3), ALL) == []
    assert failover.apply(SinkAnswered(3, 200), ALL) == [PassOn()]


def test_a_decode_engine_that_does_not_fit_this_prefill_engine_gets_another_one() -> None:
    other_q, other_e = (replace(each, compat=(("dtype", "b"),)) for each in (Q, E))
    engines = Engines(P, other_q, D, other_e)
    failover = Failover(P, D, 3, 5.0)
    failover.begin(engines)
    assert failover.apply(SinkLost(1, "gone"), engines) == [
        Release(P, D, 1),
        TookOver("decode", "D", "E", 2, "gone"),
        SendPrefill(other_q, 2),
        SendDecode(other_e, other_q, 2, 0.0),
    ]


def test_the_number_of_takeovers_is_bounded() -> None:
    failover = begun(max_takeovers=2)
    assert SendDecode(E, P, 2, 5.0) in failover.apply(SinkLost(1, "a"), ALL)
    assert SendDecode(F, P, 3, 5.0) in failover.apply(SinkLost(2, "b"), ALL)
    assert failover.apply(SinkLost(3, "c"), Engines(*ALL.engines, replace(D, engine="G"))) == [
        Release(P, F, 3),
        Fail("F", "c"),
    ]


def test_the_last_decode_engines_own_words_reach_the_client() -> None:
    broken = Answer(500, b"no")
    assert begun(PAIR).apply(SinkLost(1, "status 500", broken), PAIR) == [Release(P, D, 1), Refuse(broken)]


def test_what_prefill_refuses_decode_may_refuse_in_its_own_words() -> None:
    """H4."""
    failover = begun()
    assert failover.apply(SourceRefused(1, NO), ALL) == [AwaitVerdict()]
    assert failover.apply(SinkAnswered(1, 400), ALL) == [Release(P, D, 1), PassOn()]
    for event in (VerdictDue(), SinkLost(1, "reset")):
        failover = begun()
        failover.apply(SourceRefused(1, NO), ALL)
        assert failover.apply(event, ALL) == [Release(P, D, 1), Refuse(NO)]
        assert failover.apply(SinkAnswered(1, 200), ALL) == []


def test_what_decode_refuses_is_released() -> None:
    assert begun().apply(SinkAnswered(1, 422), ALL) == [Release(P, D, 1), PassOn()]


EVENTS: list[Event] = [
    *(SourceAnswered(attempt) for attempt in range(1, 5)),
    *(SourceLost(attempt, "x") for attempt in range(1, 5)),
    *(SinkLost(attempt, "x") for attempt in range(1, 5)),
    *(SinkAnswered(attempt, status) for attempt, status in product(range(1, 5), (200, 400))),
    *(RebindAnswered(attempt, why) for attempt, why in product(range(2, 5), ("", "its KV is here"))),
    *(EngineLeft(each, 1, "x") for each in "PQRDEF"),
    *(TransferLost(each, attempt, "x", kept) for each, attempt, kept in product("PQ", range(1, 5), (False, True))),
    SourceRefused(1, NO),
    SourceRefused(2, NO),
    VerdictDue(),
]


def walks() -> Iterator[list[Event]]:
    for seed in range(2000):
        chance = Random(seed)
        yield [chance.choice(EVENTS) for _ in range(25)]


def test_whatever_happens_in_whatever_order() -> None:
    """Attempts rise, no decode leg is sent once one was passed on, the bound holds, and there is one outcome."""
    for events in walks():
        failover = Failover(P, D, 3, 5.0)
        effects: list[Effect] = failover.begin(ALL)
        for event in events:
            effects += failover.apply(event, ALL)
        outcomes = [each for each in effects if isinstance(each, PassOn | Refuse | Fail)]
        assert len(outcomes) == failover.over
        if outcomes:
            assert effects[-1] is outcomes[0]
        attempts = [each.attempt for each in effects if isinstance(each, SendDecode)]
        assert attempts == sorted(set(attempts))
        named = [each.attempt for each in effects if not isinstance(each, PassOn | Refuse | Fail | AwaitVerdict)]
        assert all(later >= earlier for earlier, later in pairwise(named))
        moved = sum(isinstance(each, TookOver) and (each.kind == "decode" or each.instead in "PQR") for each in effects)
        assert moved <= 3
        sent = [(each.sink.engine, each.attempt) for each in effects if isinstance(each, SendDecode)]
        assert len({engine for engine, _ in sent}) == len(sent), "no lost engine is asked again"


class TestADecodeEngineThatComputesThePromptItself:
    def test_needs_no_prefill(self) -> None:
        failover = begun()
        assert failover.apply(SinkComputes("D", 1), ALL) == [Release(P, D, 1)]
        assert failover.apply(SinkComputes("D", 1), ALL) == [], "said twice"
        assert failover.apply(SourceLost(1, "reset"), ALL) == [], "nobody waits for it"
        assert failover.apply(SinkAnswered(1, 200), ALL) == [PassOn()]

    def test_another_one_does(self) -> None:
        failover = begun()
        failover.apply(SinkComputes("D", 1), ALL)
        assert failover.apply(SinkLost(1, "reset"), ALL) == [
            TookOver("decode", "D", "E", 2, "reset"),
            SendPrefill(P, 2),
            SendDecode(E, P, 2, 5.0),
        ]

    @pytest.mark.parametrize("said", [SinkComputes("E", 1), SinkComputes("D", 2)])
    def test_is_the_one_that_was_asked(self, said: SinkComputes) -> None:
        assert begun().apply(said, ALL) == []

    def test_a_refusal_of_the_prompt_goes_first(self) -> None:
        failover = begun()
        failover.apply(SourceRefused(1, NO), ALL)
        assert failover.apply(SinkComputes("D", 1), ALL) == []
        assert failover.apply(VerdictDue(), ALL) == [Release(P, D, 1), Refuse(NO)]
