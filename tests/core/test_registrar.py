"""The registrar: whole effect lists for explicit times."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from kvbus.protocol import SinkLease, term_s
from kvbus.protocol.decode import (
    NEVER_SEEN,
    UNCLAIMED_S,
    Abandon,
    Aborted,
    BusBack,
    BusLost,
    Echo,
    Effect,
    FirstToken,
    Publish,
    Rebound,
    Received,
    Register,
    Registrar,
    Reject,
    SourceLeft,
)
from kvbus.protocol.decode.patience import PATIENCE_S
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    Echoes,
    Heartbeat,
    Pulse,
    Registration,
    RegistrationAck,
    Role,
    State,
    TransferDone,
    TransferFailed,
    TransferStarted,
)

REGISTRATION = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
SOURCE = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 5}
PUBLISH_UNBOUND = Publish("P", REGISTRATION)
ECHOES = (("P", 5, 0, 1),)
PUBLISH = Publish("P", replace(REGISTRATION, source_incarnation=5, echoes=ECHOES))
BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1)


def rank(rank: int = 0, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    return {**SOURCE, "attempt": 1, "rank": rank, "ranks": ranks, "request_id": "d1", **changes}


def cancel(reason: str, engine: str = "P") -> Effect:
    return Publish(engine, Cancel("t", 1, "D", 7, "d1", reason))


def new(hint: str = "P") -> Registrar:
    registrar = Registrar(patience_s=60, transfer_timeout_s=600, cancel_timeout_s=10)
    assert registrar.apply(Pulse("P", 5, 0, 1), 0.0) == []
    expected = PUBLISH if hint else Publish("", REGISTRATION)
    assert registrar.apply(Register(REGISTRATION, hint), 0.0) == [expected]
    return registrar


FENCED = "; unanswered, fenced by the write lease"


def run_out(registrar: Registrar) -> tuple[float, list[Effect]]:
    """Let time pass until nothing is left to do; returns when that was, and everything that was done."""
    at, effects = 0.0, []
    while (deadline := registrar.next_deadline()) is not None:
        at = deadline
        effects += registrar.tick(at)
    return at, effects


def test_sent_again_until_every_rank_has_acknowledged() -> None:
    registrar = new()
    assert registrar.next_deadline() == 0.25
    assert registrar.tick(0.25) == [PUBLISH]
    assert registrar.apply(RegistrationAck(**rank(0, 2)), 0.3) == []
    assert registrar.tick(0.75) == [PUBLISH]
    assert registrar.apply(RegistrationAck(**rank(1, 2)), 0.8) == []
    assert registrar.tick(2.7) == []


def test_word_of_a_failure_that_was_lost_is_asked_for_again() -> None:
    """Without it the request would wait for as long as the prefill engine lives, up to the transfer timeout."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    registrar.apply(RegistrationAck(**rank(), claimed=True), 0.2)
    assert registrar.next_deadline() == 5.2
    registrar.apply(BEAT, 5.0)
    assert registrar.tick(5.2) == [PUBLISH]
    assert registrar.apply(RegistrationAck(**rank()), 5.3) == []
    assert registrar.tick(10.2) == [PUBLISH], "again and again, at the same interval"
    assert registrar.apply(TransferFailed(**rank(), reason="block lease expired"), 10.3) == [
        Abandon("d1", "block lease expired"),
        cancel("block lease expired"),
    ]


def test_what_is_held_but_never_seen_is_not_kept_alive_by_acknowledgements() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    registrar.apply(RegistrationAck(**rank()), UNCLAIMED_S - 0.1)
    assert registrar.tick(UNCLAIMED_S - 0.05) == [PUBLISH]
    assert registrar.next_deadline() == UNCLAIMED_S
    assert registrar.tick(UNCLAIMED_S) == [cancel("the prefill engine never saw the request")]


def test_word_that_a_request_was_seen_is_asked_for_again() -> None:
    """P4: it may be lost, and what is queued for long must not be given up for that."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    assert registrar.next_deadline() == 2.1
    assert registrar.tick(2.1) == [PUBLISH]
    assert registrar.tick(4.1) == [PUBLISH]
    registrar.apply(RegistrationAck(**rank(), claimed=True), 4.2)
    assert registrar.tick(UNCLAIMED_S) == []


@pytest.mark.parametrize("hint", ["P", ""])
def test_what_a_prefill_engine_in_a_long_step_may_have_is_waited_for(hint: str) -> None:
    """P4: it announces requests between steps only. But a heartbeat that says so for ever ends somewhen."""
    registrar, gone = new(hint), cancel("the prefill engine never saw the request" if hint else NEVER_SEEN, hint)
    if hint:
        registrar.apply(RegistrationAck(**rank()), 0.1)
    for second in range(1, int(PATIENCE_S)):
        registrar.apply(replace(BEAT, step_s=float(second)), float(second))
        assert gone not in registrar.tick(float(second))
        if second == 40:
            seen = copy.deepcopy(registrar)
    assert gone in registrar.tick(PATIENCE_S)
    seen.apply(RegistrationAck(**rank(), claimed=True), 41.0)
    assert gone not in seen.tick(PATIENCE_S)


def test_the_long_step_of_an_engine_that_was_not_asked_is_not_waited_for() -> None:
    registrar = new("P")
    registrar.apply(RegistrationAck(**rank()), 0.0)
    registrar.apply(replace(BEAT, engine="Q", step_s=4.0), 4.0)
    assert registrar.tick(UNCLAIMED_S) == [cancel("the prefill engine never saw the request")]


def test_what_nobody_in_the_pool_has_is_given_up_after_seconds() -> None:
    """P4."""
    registrar = new("")
    registrar.apply(BEAT, 1.0)
    assert registrar.tick(UNCLAIMED_S) == [cancel(NEVER_SEEN, "")]


def test_a_pooled_registration_goes_to_whoever_claimed_it() -> None:
    """Once, at once: only a registration sent to the engine itself lets it write."""
    registrar = new(hint="")
    assert registrar.apply(RegistrationAck(**rank(0, 2)), 0.1) == [PUBLISH]
    assert registrar.apply(RegistrationAck(**rank(0, 2)), 0.1) == []
    assert registrar.apply(RegistrationAck(**rank(0, 1, source_engine="Q")), 0.1) == [Reject("another prefill engine")]


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
    assert registrar.apply(FirstToken("d1"), 2.5) == [Publish("P", Delivered("t", 1, "D", 7, "d1"))]
    assert registrar.apply(FirstToken("d1"), 2.6) == []
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


def test_a_failed_transfer_is_cancelled_so_that_prefill_frees() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    assert registrar.apply(TransferFailed(**rank(), reason="post"), 1.0) == [Abandon("d1", "post"), cancel("post")]


@pytest.mark.parametrize("engine", ["Q", "P"])
def test_a_request_that_is_given_to_another_prefill_engine_ends_its_attempt_first(engine: str) -> None:
    """Only if it is not the same engine may the blocks there be freed."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    reason = f"its prefill is given to {engine}"
    wanted = Publish("P", Cancel("t", 1, "D", 7, "d1", reason, release=engine != "P"))
    assert registrar.apply(Rebound("d1", 2, engine), 1.0) == [wanted]
    assert registrar.apply(Rebound("d1", 2, engine), 1.1) == [], "it is ending already"
    assert registrar.apply(CancelAck(**rank()), 1.2) == [Abandon("d1", reason)]
    again = replace(REGISTRATION, attempt=2)
    [sent] = registrar.apply(Register(again, engine), 1.3)
    assert isinstance(sent, Publish)
    assert isinstance(sent.message, Registration)
    assert sent.message.attempt == 2
    assert registrar.apply(TransferDone(**rank()), 1.4) == [Reject("another attempt")]
    assert registrar.apply(Rebound("d1", 2, engine), 1.5) == [Reject("stale attempt")], (
        "it is the one that is registered"
    )


def test_what_was_registered_in_the_pool_is_not_released_there_when_it_is_rebound() -> None:
    """The engine that is to take over hears the pool, too."""
    [sent] = new("").apply(Rebound("d1", 2, "Q"), 1.0)
    assert isinstance(sent, Publish)
    assert isinstance(sent.message, Cancel)
    assert not sent.message.release


def test_a_refusal_ends_at_once() -> None:
    registrar = new()
    assert registrar.apply(RegistrationAck(**rank(), refused="full"), 0.1) == [Abandon("d1", "refused: full")]


def test_a_failed_prefill_is_cancelled() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    failed = TransferFailed(**rank(), reason="aborted")
    assert registrar.apply(failed, 1.0)[0] == Abandon("d1", "aborted")


def test_without_an_answer_it_gives_up_in_bounded_time() -> None:
    registrar = new()
    assert registrar.tick(60.0) == [cancel("no prefill engine acknowledged the registration")]
    at, effects = run_out(registrar)
    assert at == 70.0
    assert effects[-1] == Abandon("d1", "no prefill engine acknowledged the registration" + FENCED)


def test_a_living_prefill_engine_that_knows_the_request_may_take_its_time() -> None:
    """L5."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    registrar.apply(RegistrationAck(**rank(), claimed=True), 0.2)
    for second in range(1, 300):
        assert registrar.apply(BEAT, float(second)) == []
        assert registrar.tick(float(second)) in ([], [PUBLISH])
    assert registrar.tick(299.0 + 60.0) == [cancel("no sign of life from the prefill engine")]


def test_a_request_that_was_claimed_before_it_was_registered_may_take_its_time() -> None:
    """L5: progress is told when the request arrives; decode may have had no blocks for it yet."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank(), claimed=True), 0.1)
    for second in range(1, 300):
        registrar.apply(BEAT, float(second))
        assert registrar.tick(float(second)) in ([], [PUBLISH])


def test_a_living_prefill_engine_that_never_saw_the_request_is_not_waited_for() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    for second in range(1, int(UNCLAIMED_S)):
        registrar.apply(BEAT, float(second))
        assert registrar.tick(float(second)) in ([], [PUBLISH])
    assert registrar.tick(UNCLAIMED_S) == [cancel("the prefill engine never saw the request")]


def test_a_request_that_was_announced_may_be_queued_for_long() -> None:
    """L5, P4: only what nobody announced is given up after seconds."""
    registrar = new()
    registrar.apply(RegistrationAck(**rank(), claimed=True), UNCLAIMED_S - 1)
    for second in range(int(UNCLAIMED_S), 50):
        assert cancel("the prefill engine never saw the request") not in registrar.tick(float(second))


def test_however_many_nobody_knows_they_are_given_up_together() -> None:
    """P4."""
    registrar = new()
    for number in range(60):
        registration = replace(REGISTRATION, transfer_id=f"u{number}", request_id=f"e{number}")
        registrar.apply(Register(registration, "P"), 0.0)
        registrar.apply(RegistrationAck(**{**rank(), "transfer_id": f"u{number}", "request_id": f"e{number}"}), 0.1)
    given_up = [effect for effect in registrar.tick(UNCLAIMED_S) if isinstance(effect, Publish)]
    assert len([each for each in given_up if isinstance(each.message, Cancel)]) == 61


def test_nothing_waits_longer_than_the_transfer_timeout() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    registrar.apply(RegistrationAck(**rank(), claimed=True), 0.2)
    effects: list[Effect] = []
    for second in range(1, 601):
        registrar.apply(BEAT, float(second))
        effects += registrar.tick(float(second))
    assert effects[:-1] == [PUBLISH] * (len(effects) - 1)
    assert effects[-1:] == [cancel("no sign of life from the prefill engine")]


def test_a_prefill_engine_that_left_is_not_waited_for() -> None:
    registrar = new()
    registrar.apply(RegistrationAck(**rank()), 0.1)
    assert registrar.apply(SourceLeft("Q", 5), 1.0) == []
    assert registrar.apply(SourceLeft("P", 4), 1.0) == [], "an older incarnation"
    assert registrar.apply(SourceLeft("P", 5), 1.0) == []
    at, effects = run_out(registrar)
    assert at == pytest.approx(term_s())
    assert effects == [Abandon("d1", "prefill engine left" + FENCED)]


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
        ({"request_id": "d9"}, "another request"),
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


class TestFence:
    """F1, F3: without an answer the write lease decides when blocks may be given back."""

    TERM = term_s()

    def held(self, ranks: int = 1) -> Registrar:
        """A registration that every rank holds, and whose ranks were echoed at 0.0."""
        registrar = Registrar(lease=SinkLease(1.5, 2.0), patience_s=60, transfer_timeout_s=600, cancel_timeout_s=2)
        for number in range(ranks):
            assert registrar.apply(Pulse("P", 5, number, 1), 0.0) == []
        [published] = registrar.apply(Register(REGISTRATION, "P"), 0.0)
        echoes = tuple(("P", 5, number, 1) for number in range(ranks))
        assert published == Publish("P", replace(REGISTRATION, source_incarnation=5, echoes=echoes))
        for number in range(ranks):
            registrar.apply(RegistrationAck(**rank(number, ranks)), 0.1)
        return registrar

    @staticmethod
    def again(echoes: Echoes, epoch: int = 0) -> Registration:
        return replace(REGISTRATION, source_incarnation=5, echoes=echoes, epoch=epoch)

    def test_others_are_sent_again_in_a_new_epoch_when_one_was_given_up_unanswered(self) -> None:
        registrar = self.held()
        other = replace(REGISTRATION, transfer_id="u", request_id="d2")
        registrar.apply(Register(other, "P"), 0.0)
        registrar.apply(Aborted("d1"), 0.1)
        registrar.apply(RegistrationAck(**rank(transfer_id="u", request_id="d2")), 0.2)
        at, effects = 0.0, []
        while not any(isinstance(effect, Abandon) for effect in effects):
            at = registrar.next_deadline() or 0.0
            effects = registrar.tick(at)
        assert at == pytest.approx(self.TERM)
        sent = replace(self.again(ECHOES, epoch=1), transfer_id="u", request_id="d2")
        assert effects == [Abandon("d1", "aborted" + FENCED), Publish("P", sent)]

    def test_pulses_are_echoed_while_there_is_business(self) -> None:
        registrar = self.held()
        assert registrar.apply(Pulse("P", 5, 0, 2), 0.5) == [Echo("P", (("P", 5, 0, 2),), epoch=0)]
        assert registrar.apply(Pulse("Q", 5, 0, 2), 0.5) == [], "no business with it"
        registrar.apply(Received("d1"), 1.0)
        assert registrar.apply(Pulse("P", 5, 0, 3), 1.5) == []

    def test_an_unanswered_cancel_ends_with_the_lease_of_the_last_echo(self) -> None:
        registrar = self.held()
        registrar.apply(Pulse("P", 5, 0, 2), 0.5)
        registrar.apply(Aborted("d1"), 1.0)
        registrar.apply(Pulse("P", 5, 0, 3), 1.2)
        at, effects = run_out(registrar)
        assert effects[-1] == Abandon("d1", "aborted" + FENCED)
        assert at == pytest.approx(1.2 + self.TERM), "counted from when the last number echoed was heard"

    def test_while_it_waits_for_a_lease_to_run_out_it_does_not_renew_it(self) -> None:
        """One way partitioned: P is heard but hears nothing."""
        registrar = self.held()
        registrar.apply(Aborted("d1"), 1.0)
        assert registrar.tick(3.0) == [], "from now on it is fenced"
        for beat in range(10):
            assert registrar.apply(Pulse("P", 5, 0, 10 + beat), 3.0 + 0.05 * beat) == []
        at, _ = run_out(registrar)
        assert at == pytest.approx(self.TERM)

    def test_a_dead_prefill_engine_is_fenced_at_once(self) -> None:
        """C1: kill -9 in mid-transfer."""
        registrar = self.held()
        registrar.apply(TransferStarted(**rank()), 1.0)
        assert registrar.apply(SourceLeft("P", 5), 2.0) == []
        assert run_out(registrar) == (pytest.approx(self.TERM), [Abandon("d1", "prefill engine left" + FENCED)])

    def test_ranks_that_answered_need_no_lease(self) -> None:
        registrar = self.held(ranks=2)
        registrar.apply(Pulse("P", 5, 0, 2), 1.0)
        registrar.apply(Aborted("d1"), 1.5)
        registrar.apply(CancelAck(**rank(0, 2)), 1.6)
        at, _ = run_out(registrar)
        assert at == pytest.approx(self.TERM), "rank 1 was last heard at 0.0"

    def test_an_answer_during_the_fence_ends_it(self) -> None:
        registrar = self.held()
        registrar.apply(Aborted("d1"), 1.0)
        registrar.tick(3.0)
        assert registrar.apply(CancelAck(**rank()), 3.1) == [Abandon("d1", "aborted")]

    def test_the_bus_away_is_fenced_after_a_moment(self) -> None:
        """C6."""
        registrar = self.held()
        assert registrar.apply(BusLost(), 2.0) == []
        at, effects = run_out(registrar)
        assert at == pytest.approx(self.TERM)
        assert effects == [Abandon("d1", "the bus is away" + FENCED)]

    def test_a_bus_that_is_back_in_time_changes_nothing(self) -> None:
        registrar = self.held()
        registrar.apply(BusLost(), 2.0)
        assert registrar.apply(BusBack(), 2.5) == [Publish("P", self.again((("P", 5, 0, 1),)))]
        assert registrar.tick(4.0) == []

    def test_nobody_was_given_a_right_through_the_pool(self) -> None:
        registrar = Registrar(lease=SinkLease(), patience_s=5, cancel_timeout_s=2)
        registrar.apply(Pulse("P", 5, 0, 1), 0.0)
        assert registrar.apply(Register(REGISTRATION, ""), 0.0) == [Publish("", REGISTRATION)]
        at, effects = run_out(registrar)
        assert (at, effects[-1]) == (7.0, Abandon("d1", NEVER_SEEN + FENCED))


def test_an_engine_whose_incarnation_is_unknown_is_given_the_right_when_it_answers() -> None:
    registrar = Registrar()
    assert registrar.apply(Register(REGISTRATION, "P"), 0.0) == [PUBLISH_UNBOUND]
    bound = Publish("P", replace(REGISTRATION, source_incarnation=5))
    assert registrar.apply(RegistrationAck(**rank()), 0.1) == [bound]
    assert registrar.apply(RegistrationAck(**rank()), 0.2) == []
