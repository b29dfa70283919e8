"""The registrar: whole effect lists for explicit times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbus.messages import (
    Cancel,
    CancelAck,
    Heartbeat,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Registration,
    RegistrationAck,
    Role,
    State,
    TransferDone,
    TransferFailed,
    TransferStarted,
)
from kvbus.registrar import (
    Abandon,
    Aborted,
    BusBack,
    Effect,
    Publish,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)

REGISTRATION = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
SOURCE = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 5}
PUBLISH = Publish("P", REGISTRATION)
BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1)


def rank(rank: int = 0, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    return {**SOURCE, "attempt": 1, "rank": rank, "ranks": ranks, "request_id": "d1", **changes}


def cancel(reason: str, engine: str = "P") -> Effect:
    return Publish(engine, Cancel("t", 1, "D", 7, "d1", reason))


def new(hint: str = "P") -> Registrar:
    registrar = Registrar(patience_s=60, transfer_timeout_s=600, cancel_timeout_s=10)
    assert registrar.apply(Register(REGISTRATION, hint), 0.0) == [Publish(hint, REGISTRATION)]
    return registrar


def test_sent_again_until_every_rank_has_acknowledged() -> None:
    registrar = new()
    assert registrar.next_deadline() == 0.25
    assert registrar.tick(0.25) == [PUBLISH]
    assert registrar.apply(RegistrationAck(**rank(0, 2)), 0.3) == []
    assert registrar.tick(0.75) == [PUBLISH]
    assert registrar.apply(RegistrationAck(**rank(1, 2)), 0.8) == []
    assert registrar.tick(5.0) == []


def test_a_pooled_registration_goes_to_whoever_claimed_it() -> None:
    registrar = new(hint="")
    registrar.apply(RegistrationAck(**rank(0, 2)), 0.1)
    assert registrar.tick(0.25) == [PUBLISH]


def test_the_good_path_ends_with_the_receive() -> None:
    registrar = new()
    for message in (
        RegistrationAck(**rank()),
        TransferStarted(**rank()),
        TransferDone(**rank(), blocks=3, nbytes=9, late_side="decode"),
    ):
        assert registrar.apply(message, 1.0) == []
    assert registrar.apply(Received("d1"), 2.0) == []
    assert len(registrar) == 0
    assert registrar.apply(RegistrationAck(**rank()), 3.0) == [Reject("unknown transfer")]
    assert registrar.next_deadline() is None


def test_an_abort_waits_for_the_cancels_acknowledgement() -> None:
    """F1."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank(0, 2)), 0.1)
    registrar.apply(RegistrationAck(**rank(1, 2)), 0.1)
    assert registrar.apply(Aborted("d1"), 1.0) == [cancel("aborted")]
    assert registrar.apply(CancelAck(**rank(0, 2)), 1.1) == []
    assert registrar.tick(1.3) == [cancel("aborted")], "sent again"
    assert registrar.apply(CancelAck(**rank(1, 2)), 1.4) == [Abandon("d1", "aborted")]


def test_a_failure_of_one_rank_waits_for_the_other() -> None:
    """K4."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank(0, 2)), 0.1)
    registrar.apply(RegistrationAck(**rank(1, 2)), 0.1)
    registrar.apply(TransferStarted(**rank(1, 2)), 0.2)
    assert registrar.apply(TransferFailed(**rank(0, 2), reason="post"), 1.0) == [cancel("post")]
    assert registrar.apply(TransferDone(**rank(1, 2)), 3.0) == [Abandon("d1", "post")]


def test_a_refusal_ends_at_once() -> None:
    registrar = new()
    assert registrar.apply(RegistrationAck(**rank(), refused="full"), 0.1) == [Abandon("d1", "refused: full")]


def test_a_failed_prefill_is_cancelled() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    failed = PrefillFailed(**SOURCE, request_id="p1", reason="aborted")
    assert registrar.apply(failed, 1.0) == [cancel("prefill failed: aborted")]
    assert registrar.apply(CancelAck(**rank()), 1.1) == [Abandon("d1", "prefill failed: aborted")]


def test_without_an_answer_it_gives_up_in_bounded_time() -> None:
    registrar = new()
    assert registrar.tick(60.0) == [cancel("no prefill engine acknowledged the registration")]
    at, effects = 60.0, []
    while (deadline := registrar.next_deadline()) is not None:
        at = deadline
        effects = registrar.tick(at)
    assert at == 70.0
    assert effects == [Abandon("d1", "no prefill engine acknowledged the registration; cancel not acknowledged")]


def test_a_living_prefill_engine_that_knows_the_request_may_take_its_time() -> None:
    """L5."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    registrar.apply(PrefillProgress(**SOURCE, request_id="p1", computed=0, total=96), 0.2)
    for second in range(1, 300):
        assert registrar.apply(BEAT, float(second)) == []
        assert registrar.tick(float(second)) == []
    assert registrar.tick(299.0 + 60.0) == [cancel("no sign of life from the prefill engine")]


def test_a_living_prefill_engine_that_never_saw_the_request_is_not_waited_for() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    for second in range(1, 60):
        registrar.apply(BEAT, float(second))
        assert registrar.tick(float(second)) == []
    assert registrar.tick(60.1) == [cancel("the prefill engine never saw the request")]


def test_nothing_waits_longer_than_the_transfer_timeout() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    registrar.apply(PrefillCompleted(**SOURCE, request_id="p1", blocks=(), tokens=96), 0.2)
    effects: list[Effect] = []
    for second in range(1, 601):
        registrar.apply(BEAT, float(second))
        effects += registrar.tick(float(second))
    assert effects == [cancel("no sign of life from the prefill engine")]


def test_a_prefill_engine_that_left_is_not_waited_for() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    assert registrar.apply(SourceLeft("Q", 5), 1.0) == []
    assert registrar.apply(SourceLeft("P", 4), 1.0) == [], "an older incarnation"
    assert registrar.apply(SourceLeft("P", 5), 1.0) == [Abandon("d1", "prefill engine left")]


def test_when_the_bus_is_back_live_registrations_are_announced_again() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    assert registrar.apply(BusBack(), 5.0) == [PUBLISH]
    registrar.apply(Aborted("d1"), 6.0)
    assert registrar.apply(BusBack(), 7.0) == [cancel("aborted")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": 2}, "another attempt"),
        ({"source_engine": "Q"}, "another prefill engine"),
        ({"source_incarnation": 6}, "another incarnation"),
        ({"rank": 1}, "bad rank"),
        ({"ranks": 2}, "bad rank"),
    ],
)
def test_what_comes_from_elsewhere_is_refused(changes: dict[str, Any], reason: str) -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    assert registrar.apply(TransferFailed(**rank(**changes), reason="x"), 1.0) == [Reject(reason)]


def test_a_transfer_id_in_use_is_given_up_at_once() -> None:
    registrar = new()
    second = replace(REGISTRATION, request_id="d2")
    assert registrar.apply(Register(second, "P"), 1.0) == [Abandon("d2", "transfer id in use")]
    assert len(registrar) == 1


def test_unknown_requests_are_refused() -> None:
    registrar = new()
    assert registrar.apply(Aborted("d9"), 1.0) == [Reject("abort of unknown request")]
    assert registrar.apply(Received("d9"), 1.0) == [Reject("unknown request")]
