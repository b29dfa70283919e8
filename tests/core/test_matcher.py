"""The matcher: whole effect lists for explicit times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbus.protocol.prefill import (
    Drain,
    Effect,
    Introduce,
    Matcher,
    PooledCancel,
    PooledRegistration,
    PostWrite,
    Reject,
    ReleaseBlocks,
    Released,
    Send,
    SinkJoined,
    SinkLeft,
    SinkRefused,
    WriteEnded,
    WriteJob,
)
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    LeaseEcho,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Release,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
)

SOURCE = {"transfer_id": "t", "source_engine": "P", "source_incarnation": 5}
RANK = {**SOURCE, "attempt": 1, "rank": 0, "ranks": 1, "request_id": "d1"}
POOLED = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
REGISTRATION = replace(POOLED, source_incarnation=5)
COMPLETED = PrefillCompleted(**SOURCE, request_id="p1", blocks=(((0, 3),),), tokens=96)
FAILED = PrefillFailed(**SOURCE, request_id="p1", reason="aborted")
PROGRESS = PrefillProgress(**SOURCE, request_id="p1", computed=0, total=96)
CANCEL = Cancel("t", 1, "D", 7, "d1", "aborted")
DELIVERED = Delivered("t", 1, "D", 7, "d1")
JOINED = SinkJoined("D", 7, 64)
ACK = Send("D", RegistrationAck(**RANK))
CLAIMED = Send("D", RegistrationAck(**RANK, claimed=True))
CANCEL_ACK = Send("D", CancelAck(**RANK))
STARTED = Send("D", TransferStarted(**RANK))
POST = PostWrite(WriteJob("t", 1, "p1", (((0, 3),),), "D", 7, "d1", (((10, 3),),)))
RELEASE = ReleaseBlocks("p1")
FOREVER: dict[str, Any] = {"write_lease_s": 1e9}


def refusal(reason: str, **changes: Any) -> Effect:
    return Send("D", RegistrationAck(**{**RANK, **changes}, refused=reason))


def failure(reason: str, *, kept: bool = False) -> Effect:
    return Send("D", TransferFailed(**RANK, reason=reason, kept=kept))


@pytest.fixture
def matcher() -> Matcher:
    """It may write into D and E for ever: the lease has tests of its own below."""
    return leased(Matcher(engine="P", incarnation=5, rank=0, ranks=1, block_lease_s=30, pool_hold_s=10, **FOREVER))


def leased(matcher: Matcher) -> Matcher:
    assert matcher.pulse(0.0) == Pulse("P", 5, 0, 1)
    for sink in ("D", "E"):
        assert matcher.apply(LeaseEcho(sink, 7, (("P", 5, 0, 1),)), 0.0) == []
    assert matcher.apply(JOINED, 0.0) == []
    return matcher


def test_registration_first(matcher: Matcher) -> None:
    assert matcher.apply(REGISTRATION, 1.0) == [ACK]
    assert matcher.apply(COMPLETED, 3.0) == [POST, STARTED]
    done = TransferDone(**RANK, blocks=3, nbytes=900, late_side="prefill", match_wait_s=2.0, queue_s=0.0, write_s=0.5)
    assert matcher.apply(WriteEnded("t", 1, 900), 3.5) == [Send("D", done)]
    assert matcher.apply(DELIVERED, 3.6) == [RELEASE]
    assert matcher.counts["transfers"] == 0


def test_completion_first(matcher: Matcher) -> None:
    assert matcher.apply(COMPLETED, 1.0) == []
    assert matcher.apply(REGISTRATION, 3.0) == [CLAIMED, POST, STARTED]
    [sent] = matcher.apply(WriteEnded("t", 1, 900), 3.5)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, TransferDone)
    assert (sent.message.late_side, sent.message.match_wait_s) == ("decode", 2.0)


def test_the_first_token_goes_with_the_kv_to_who_asks_and_not_over_the_bus(matcher: Matcher) -> None:
    completed = replace(COMPLETED, first_token=77)
    assert matcher.apply(Wanted("t", 1, "D", 7, "d1"), 0.5) == []
    assert matcher.apply(completed, 1.0) == [Send("D", replace(COMPLETED, blocks=()))]
    posted = matcher.apply(replace(REGISTRATION, takes_token=True), 3.0)
    assert PostWrite(replace(POST.job, first_token=77)) in posted


def test_who_does_not_ask_for_the_first_token_gets_none(matcher: Matcher) -> None:
    matcher.apply(replace(COMPLETED, first_token=77), 1.0)
    assert POST in matcher.apply(REGISTRATION, 3.0)


def test_both_twice_are_joined_once(matcher: Matcher) -> None:
    assert matcher.apply(REGISTRATION, 1.0) == [ACK]
    assert matcher.apply(REGISTRATION, 1.1) == [ACK]
    assert matcher.apply(COMPLETED, 2.0) == [POST, STARTED]
    assert matcher.apply(COMPLETED, 2.1) == [Reject("duplicate completion")]
    assert matcher.apply(REGISTRATION, 2.2) == [CLAIMED]
    [done] = matcher.apply(WriteEnded("t", 1, 900), 3.0)
    assert matcher.apply(REGISTRATION, 3.05) == [done]
    assert matcher.apply(DELIVERED, 3.06) == [RELEASE]
    assert matcher.apply(DELIVERED, 3.07) == [Reject("late delivery")]
    assert matcher.apply(COMPLETED, 3.1) == [Reject("duplicate completion")]
    assert matcher.apply(REGISTRATION, 3.2) == [done], "D asks again because word of the end was lost"
    assert matcher.apply(WriteEnded("t", 1, 900), 3.3) == [Reject("unknown write")]


def test_a_used_up_transfer_is_refused_to_another_request(matcher: Matcher) -> None:
    """H5: replayed parameters."""
    matcher.apply(COMPLETED, 1.0)
    matcher.apply(REGISTRATION, 2.0)
    matcher.apply(WriteEnded("t", 1, 900), 3.0)
    refused = [refusal("already transferred", request_id="d2")]
    assert matcher.apply(replace(REGISTRATION, request_id="d2"), 4.0) == refused
    assert matcher.apply(DELIVERED, 5.0) == [RELEASE]
    assert matcher.apply(replace(REGISTRATION, request_id="d2"), 6.0) == refused


def test_the_kv_stays_until_the_first_token_is_out(matcher: Matcher) -> None:
    matcher.apply(COMPLETED, 1.0)
    matcher.apply(REGISTRATION, 2.0)
    matcher.apply(WriteEnded("t", 1, 900), 3.0)
    assert matcher.counts["written"] == 1
    assert matcher.tick(32.9) == []
    assert matcher.tick(33.0) == [RELEASE], "word of the first token was lost"
    assert [type(effect.message) for effect in matcher.apply(REGISTRATION, 34.0) if isinstance(effect, Send)] == [
        TransferDone
    ]


def test_a_first_token_before_the_word_of_the_writes_end(matcher: Matcher) -> None:
    matcher.apply(COMPLETED, 1.0)
    matcher.apply(REGISTRATION, 2.0)
    assert matcher.apply(DELIVERED, 2.5) == []
    assert matcher.apply(WriteEnded("t", 1, 900), 3.0)[-1] == RELEASE


class TestTakingOver:
    """A decode engine dies before its first token: another one gets the KV that is still here."""

    SECOND = Registration("t", 2, "E", 7, "e1", (((20, 3),),), 96, source_incarnation=5)

    @pytest.fixture
    def ready(self, matcher: Matcher) -> Matcher:
        matcher.apply(SinkJoined("E", 7, 64), 0.0)
        matcher.apply(COMPLETED, 1.0)
        matcher.apply(REGISTRATION, 2.0)
        return matcher

    def is_written(self, effects: list[Effect]) -> bool:
        return [effect.job.sink_engine for effect in effects if isinstance(effect, PostWrite)] == ["E"]

    def test_after_it_was_written(self, ready: Matcher) -> None:
        ready.apply(WriteEnded("t", 1, 900), 3.0)
        assert ready.apply(SinkLeft("D", 7), 6.0) == []
        assert ready.apply(REGISTRATION, 6.5) == [refusal("superseded by another attempt")], "never written twice"
        assert self.is_written(ready.apply(self.SECOND, 7.0))

    def test_under_the_write(self, ready: Matcher) -> None:
        assert ready.apply(self.SECOND, 2.5) == [Reject("write in progress")]
        [done] = ready.apply(WriteEnded("t", 1, 900), 3.0)
        assert isinstance(done, Send)
        assert isinstance(done.message, TransferDone)
        assert self.is_written(ready.apply(self.SECOND, 3.5))

    def test_the_write_fails_with_it(self, ready: Matcher) -> None:
        assert ready.apply(WriteEnded("t", 1, 0, "remote disconnect"), 3.0) == [failure("remote disconnect", kept=True)]
        assert ready.apply(SinkLeft("D", 7), 6.0) == []
        assert self.is_written(ready.apply(self.SECOND, 7.0))

    def test_the_write_ends_after_it_left(self, ready: Matcher) -> None:
        ready.apply(SinkLeft("D", 7), 2.5)
        ready.apply(WriteEnded("t", 1, 900), 3.0)
        assert self.is_written(ready.apply(self.SECOND, 7.0))

    def test_a_cancel_of_the_first_is_remembered_when_the_second_leaves(self, matcher: Matcher) -> None:
        """F4: the first decode engine has its blocks back; its registration may still be under way, doubled."""
        matcher.apply(SinkJoined("E", 7, 64), 0.0)
        matcher.apply(replace(self.SECOND, source_incarnation=5), 1.0)
        assert matcher.apply(CANCEL, 2.0) == [CANCEL_ACK]
        matcher.apply(SinkLeft("E", 7), 3.0)
        matcher.apply(COMPLETED, 4.0)
        assert matcher.apply(REGISTRATION, 5.0) == [refusal("superseded by another attempt")]

    @pytest.mark.parametrize("word", [DELIVERED, CANCEL], ids=["delivered", "cancel"])
    def test_word_of_the_first_frees_nothing_that_the_second_waits_for(
        self, ready: Matcher, word: Delivered | Cancel
    ) -> None:
        ready.apply(self.SECOND, 2.5)
        ready.apply(WriteEnded("t", 1, 900), 3.0)
        assert RELEASE not in ready.apply(word, 3.2)
        assert self.is_written(ready.apply(self.SECOND, 3.5))

    def test_nobody_takes_over(self, ready: Matcher) -> None:
        ready.apply(WriteEnded("t", 1, 900), 3.0)
        ready.apply(SinkLeft("D", 7), 6.0)
        assert ready.tick(33.0) == [RELEASE]

    def test_the_first_token_of_an_older_attempt_frees_nothing(self, ready: Matcher) -> None:
        ready.apply(WriteEnded("t", 1, 900), 3.0)
        ready.apply(self.SECOND, 3.5)
        assert ready.apply(DELIVERED, 4.0) == [Reject("late delivery")]


def test_the_match_waits_for_the_sinks_memory() -> None:
    matcher = Matcher(engine="P", incarnation=5, rank=0, ranks=1, **FOREVER)
    matcher.pulse(0.0)
    assert matcher.apply(replace(REGISTRATION, echoes=(("P", 5, 0, 1),)), 1.0) == [ACK, Introduce("D")]
    assert matcher.apply(COMPLETED, 2.0) == [CLAIMED]
    assert matcher.apply(SinkJoined("D", 6, 64), 2.5) == [], "an older incarnation"
    effects = matcher.apply(JOINED, 3.0)
    assert effects == [POST, STARTED]
    assert held_up(effects) == "the decode engine's memory to be known here"


def held_up(effects: list[Effect]) -> str:
    """What a WRITE had to wait for when both halves were known (P8)."""
    [found] = [effect.job.held_up for effect in effects if isinstance(effect, PostWrite)]
    return found


def test_a_write_says_what_it_had_to_wait_for() -> None:
    """P8."""
    matcher = Matcher(engine="P", incarnation=5, rank=0, ranks=1)
    number = matcher.pulse(0.0).number
    matcher.apply(JOINED, 0.0)
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(COMPLETED, 1.0)
    echo = LeaseEcho("D", 7, (("P", 5, 0, number),))
    assert held_up(matcher.apply(echo, 1.1)) == "a write lease of the decode engine"
    matcher = Matcher(engine="P", incarnation=5, rank=0, ranks=1, **FOREVER)
    echoed = replace(REGISTRATION, echoes=(("P", 5, 0, matcher.pulse(0.0).number),))
    matcher.apply(JOINED, 0.0)
    matcher.apply(PooledRegistration(POOLED), 1.0)
    matcher.apply(COMPLETED, 1.0)
    assert held_up(matcher.apply(echoed, 1.1)) == "a registration that is sent to this engine itself"
    matcher.apply(WriteEnded("t", 1), 2.0)
    matcher.apply(replace(echoed, transfer_id="u", request_id="d2"), 2.0)
    assert held_up(matcher.apply(replace(COMPLETED, transfer_id="u", request_id="p2"), 2.0)) == "", "nothing"


def test_a_pooled_registration_is_answered_by_the_engine_that_has_the_transfer(matcher: Matcher) -> None:
    assert matcher.apply(PooledRegistration(POOLED), 1.0) == []
    assert matcher.apply(PROGRESS, 2.0) == [CLAIMED]
    assert matcher.apply(PooledRegistration(POOLED), 2.1) == [CLAIMED]
    assert matcher.apply(COMPLETED, 3.0) == [], "two engines may have it: D binds one by registering with it"
    assert matcher.apply(REGISTRATION, 3.1) == [CLAIMED, POST, STARTED]
    assert matcher.apply(PooledRegistration(POOLED), 3.2) == [CLAIMED]


def test_a_registration_for_another_incarnation_of_this_engine_is_not_ours(matcher: Matcher) -> None:
    """It was sent before a restart and arrives after: what was cancelled since is forgotten."""
    matcher.apply(COMPLETED, 1.0)
    assert matcher.apply(replace(POOLED, source_incarnation=4), 2.0) == [Reject("for another incarnation")]
    assert matcher.apply(POOLED, 3.0) == [CLAIMED], "D does not know the incarnation yet: the acknowledgement says it"
    assert matcher.apply(REGISTRATION, 4.0) == [CLAIMED, POST, STARTED]


def test_decode_is_told_of_the_prefills_progress_until_it_is_done(matcher: Matcher) -> None:
    """It does not hear it itself; and word of it may be lost, so each one is told."""
    assert matcher.apply(REGISTRATION, 1.0) == [ACK]
    assert matcher.apply(PROGRESS, 2.0) == [CLAIMED]
    assert matcher.apply(replace(PROGRESS, computed=32), 3.0) == [CLAIMED]
    assert matcher.apply(COMPLETED, 4.0) == [POST, STARTED]
    assert matcher.apply(PROGRESS, 5.0) == []


def test_a_newer_epoch_forgets_older_registrations(matcher: Matcher) -> None:
    """They may have been given back without an answer from here."""
    other = replace(REGISTRATION, transfer_id="u", request_id="d2")
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(other, 1.0)
    assert matcher.apply(replace(other, epoch=1), 2.0) == [
        Send("D", RegistrationAck(**{**RANK, "transfer_id": "u", "request_id": "d2"}))
    ]
    assert matcher.apply(COMPLETED, 3.0) == []
    assert matcher.apply(REGISTRATION, 4.0) == [Reject("stale epoch")]
    assert matcher.apply(LeaseEcho("D", 7, (), epoch=0), 4.0) == [Reject("stale epoch")]
    [post, _] = matcher.apply(replace(COMPLETED, transfer_id="u", request_id="p2"), 5.0)
    assert isinstance(post, PostWrite)


def test_a_pooled_registration_after_the_completion(matcher: Matcher) -> None:
    assert matcher.apply(PROGRESS, 1.0) == []
    assert matcher.apply(COMPLETED, 2.0) == []
    assert matcher.apply(PooledRegistration(POOLED), 3.0) == [CLAIMED]
    assert matcher.apply(REGISTRATION, 3.1) == [CLAIMED, POST, STARTED]


def test_a_pooled_registration_of_others_is_dropped(matcher: Matcher) -> None:
    assert matcher.apply(PooledRegistration(POOLED), 1.0) == []
    assert matcher.next_deadline() == 11.0
    assert matcher.tick(11.0) == [Reject("unclaimed registration")]
    assert matcher.counts["transfers"] == 0


def test_a_completion_without_registration_ends_with_the_lease(matcher: Matcher) -> None:
    assert matcher.apply(COMPLETED, 1.0) == []
    assert matcher.tick(30.9) == []
    assert matcher.tick(31.0) == [RELEASE]
    assert matcher.apply(REGISTRATION, 32.0) == [refusal("block lease expired")]


def test_leases_end_one_by_one(matcher: Matcher) -> None:
    """L2: a later one in front does not keep earlier ones."""
    for number, at in (("4", 4.0), ("1", 1.0), ("2", 2.0)):
        matcher.apply(replace(COMPLETED, transfer_id=number, request_id=number), at)
    assert matcher.tick(32.5) == [ReleaseBlocks("1"), ReleaseBlocks("2")]


def test_the_lease_does_not_end_a_running_write(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(COMPLETED, 2.0)
    assert matcher.next_deadline() is None
    assert matcher.tick(1000.0) == []


def test_a_failed_write_is_told_and_its_kv_kept_until_decode_cancels(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(COMPLETED, 2.0)
    assert matcher.apply(WriteEnded("t", 1, 0, "remote disconnect"), 3.0) == [failure("remote disconnect", kept=True)]
    assert matcher.apply(REGISTRATION, 3.5) == [refusal("superseded by another attempt")]
    assert matcher.apply(CANCEL, 4.0) == [RELEASE, CANCEL_ACK]


def test_a_failed_prefill_is_told(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    assert matcher.apply(FAILED, 2.0) == [failure("aborted")]
    assert matcher.apply(COMPLETED, 3.0) == [RELEASE, Reject("late completion")]


def test_a_failed_prefill_before_the_registration(matcher: Matcher) -> None:
    assert matcher.apply(FAILED, 1.0) == []
    assert matcher.apply(REGISTRATION, 2.0) == [refusal("prefill failed")]


def test_cancel_before_the_match(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    assert matcher.apply(CANCEL, 2.0) == [CANCEL_ACK]
    assert matcher.apply(CANCEL, 2.1) == [CANCEL_ACK], "the first acknowledgement may be lost"
    assert matcher.apply(COMPLETED, 3.0) == [RELEASE, Reject("late completion")]


def test_cancel_frees_a_completion(matcher: Matcher) -> None:
    matcher.apply(COMPLETED, 1.0)
    assert matcher.apply(CANCEL, 2.0) == [RELEASE, CANCEL_ACK]


def test_cancel_of_one_attempt_keeps_the_completion_for_the_next(matcher: Matcher) -> None:
    matcher.apply(COMPLETED, 1.0)
    matcher.apply(replace(REGISTRATION, prompt_tokens=96, sink_incarnation=9), 1.5)
    assert matcher.apply(replace(CANCEL, release=False), 2.0) == [CANCEL_ACK]
    assert matcher.apply(REGISTRATION, 2.5) == [refusal("superseded by another attempt")], "F4: never after the answer"
    assert matcher.apply(replace(REGISTRATION, attempt=2), 3.0)[0] == Send(
        "D", RegistrationAck(**{**RANK, "attempt": 2, "claimed": True})
    )


def test_cancel_during_the_write_is_acknowledged_when_it_has_ended(matcher: Matcher) -> None:
    """F4."""
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(COMPLETED, 2.0)
    assert matcher.apply(CANCEL, 2.5) == []
    assert matcher.apply(WriteEnded("t", 1, 900), 3.0) == [RELEASE, CANCEL_ACK]


def test_a_cancelled_attempt_stays_cancelled_though_the_prefill_has_not_begun(matcher: Matcher) -> None:
    assert matcher.apply(replace(CANCEL, release=False), 1.0) == [CANCEL_ACK]
    assert matcher.apply(REGISTRATION, 2.0) == [refusal("superseded by another attempt")]
    assert matcher.apply(COMPLETED, 3.0) == []
    assert matcher.apply(replace(REGISTRATION, attempt=2), 4.0)[1:] == [
        PostWrite(replace(POST.job, attempt=2)),
        Send("D", TransferStarted(**{**RANK, "attempt": 2})),
    ]


def test_cancel_of_something_unknown(matcher: Matcher) -> None:
    assert matcher.apply(CANCEL, 1.0) == [CANCEL_ACK]
    assert matcher.apply(REGISTRATION, 2.0) == [refusal("cancelled")]


def test_a_pooled_cancel_of_something_unknown_is_not_ours_but_remembered(matcher: Matcher) -> None:
    assert matcher.apply(PooledCancel(CANCEL), 1.0) == [Reject("foreign cancel")]
    assert matcher.apply(COMPLETED, 2.0) == [RELEASE, Reject("late completion")]


UNSERVED = Released(Release("t", 1, "router", "D", 7, "not served"))


def test_a_routers_release_frees_what_nobody_took(matcher: Matcher) -> None:
    assert matcher.apply(COMPLETED, 1.0) == []
    assert matcher.apply(UNSERVED, 2.0) == [RELEASE]
    assert matcher.apply(UNSERVED, 2.1) == []
    assert matcher.apply(REGISTRATION, 3.0) == [refusal("cancelled")]


def test_a_release_before_the_prefill_is_remembered(matcher: Matcher) -> None:
    assert matcher.apply(UNSERVED, 1.0) == []
    assert matcher.apply(COMPLETED, 2.0) == [RELEASE, Reject("late completion")]


def test_a_release_that_is_a_lie_touches_no_write_and_tells_who_waits(matcher: Matcher) -> None:
    """Any client of the bus may say it: it may cost a recompute, and no more."""
    matcher.apply(REGISTRATION, 1.0)
    assert matcher.apply(UNSERVED, 2.0) == [refusal("cancelled")]
    other = replace(REGISTRATION, transfer_id="u")
    matcher.apply(other, 3.0)
    matcher.apply(replace(COMPLETED, transfer_id="u"), 3.0)
    assert matcher.counts["writing"] == 1
    lie = Released(replace(UNSERVED.word, transfer_id="u"))
    assert matcher.apply(lie, 3.1) == [Reject("release of what is served")]
    matcher.apply(WriteEnded("u", 1, 900), 4.0)
    assert matcher.apply(lie, 4.1) == [RELEASE], "written already"


def test_what_anybody_may_say_does_not_stand_against_a_bound_registration(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    lie = replace(POOLED, attempt=9, sink_engine="E", request_id="x")
    assert matcher.apply(PooledRegistration(lie), 1.1) == [Reject("bound already")]
    assert matcher.apply(PooledCancel(replace(CANCEL, attempt=9)), 1.2) == [Reject("stale cancel")]
    assert matcher.apply(COMPLETED, 2.0) == [POST, STARTED]


def test_a_bound_registration_replaces_what_anybody_may_have_said(matcher: Matcher) -> None:
    lie = replace(POOLED, attempt=9, sink_engine="E", request_id="x")
    assert matcher.apply(PooledRegistration(lie), 1.0) == [Introduce("E")]
    assert matcher.apply(REGISTRATION, 1.1) == [ACK]
    assert matcher.apply(COMPLETED, 2.0) == [POST, STARTED]


def test_a_higher_attempt_replaces_a_lower_one(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    other = replace(REGISTRATION, attempt=2, sink_engine="E", request_id="e1")
    assert matcher.apply(SinkJoined("E", 7, 64), 1.5) == []
    assert matcher.apply(other, 2.0) == [
        refusal("superseded by another attempt"),
        Send("E", RegistrationAck(**{**RANK, "attempt": 2, "request_id": "e1"})),
    ]
    assert matcher.apply(REGISTRATION, 2.1) == [refusal("superseded by another attempt")]
    assert matcher.apply(CANCEL, 2.2) == [CANCEL_ACK]
    [post, _] = matcher.apply(COMPLETED, 3.0)
    assert isinstance(post, PostWrite)
    assert (post.job.sink_engine, post.job.attempt) == ("E", 2)


def test_a_higher_attempt_waits_for_a_running_write(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(COMPLETED, 2.0)
    assert matcher.apply(replace(REGISTRATION, attempt=2), 2.5) == [Reject("write in progress")]


def test_registrations_of_an_older_incarnation_are_stale(matcher: Matcher) -> None:
    assert matcher.apply(replace(REGISTRATION, sink_incarnation=6), 1.0) == [Reject("stale incarnation")]


def test_a_sink_that_left_is_not_written(matcher: Matcher) -> None:
    matcher.apply(REGISTRATION, 1.0)
    assert matcher.apply(SinkLeft("D", 7), 2.0) == []
    assert matcher.apply(COMPLETED, 3.0) == []
    assert matcher.tick(33.0) == [RELEASE]


def test_a_restarted_sink_is_not_sent_its_predecessors_blocks(matcher: Matcher) -> None:
    """C3."""
    matcher.apply(REGISTRATION, 1.0)
    assert matcher.apply(SinkJoined("D", 8, 64), 2.0) == []
    assert matcher.apply(COMPLETED, 3.0) == []


def test_an_unfit_sink_is_refused_with_the_reason(matcher: Matcher) -> None:
    assert matcher.apply(replace(REGISTRATION, sink_engine="E"), 1.0)[1:] == [Introduce("E")]
    refused = SinkRefused("E", 7, "dtype: bfloat16 here, float32 on E")
    expected = Send("E", RegistrationAck(**RANK, refused=refused.reason))
    assert matcher.apply(refused, 2.0) == [expected]
    assert matcher.apply(replace(REGISTRATION, sink_engine="E"), 3.0) == [expected]


@pytest.mark.parametrize(
    ("registration", "reason"),
    [
        (replace(REGISTRATION, digest="ab"), "decode and prefill were given different prompts under one transfer id"),
        (replace(REGISTRATION, prompt_tokens=97), "prompt has 97 tokens on decode, 96 on prefill"),
        (replace(REGISTRATION, blocks=(((10, 3),), ())), "2 KV groups on decode, 1 on prefill"),
        (replace(REGISTRATION, blocks=(((62, 3),),)), "block 64 is out of the decode engine's 64 blocks"),
    ],
)
def test_what_does_not_fit_together_is_not_written(matcher: Matcher, registration: Registration, reason: str) -> None:
    """F6, H5."""
    matcher.apply(registration, 1.0)
    assert matcher.apply(replace(COMPLETED, digest="cd"), 2.0) == [failure(reason), RELEASE]


@pytest.mark.parametrize("change", [{"source_engine": "Q"}, {"source_incarnation": 4}])
def test_other_engines_prefills_are_foreign(matcher: Matcher, change: dict[str, Any]) -> None:
    matcher.apply(REGISTRATION, 1.0)
    for message in (COMPLETED, FAILED, PROGRESS):
        assert matcher.apply(replace(message, **change), 2.0) == [Reject("foreign prefill")]


def test_a_transfer_id_used_twice_frees_the_second(matcher: Matcher) -> None:
    matcher.apply(COMPLETED, 1.0)
    again = replace(COMPLETED, request_id="p2")
    assert matcher.apply(again, 2.0) == [ReleaseBlocks("p2"), Reject("transfer id reused")]


def test_a_full_table_refuses_and_frees() -> None:
    matcher = leased(Matcher(engine="P", incarnation=5, rank=0, ranks=1, max_transfers=1, **FOREVER))
    matcher.apply(replace(REGISTRATION, transfer_id="other"), 1.0)
    assert matcher.apply(REGISTRATION, 2.0) == [refusal("full")]
    assert matcher.apply(PooledRegistration(POOLED), 2.0) == [Reject("late registration")]
    assert matcher.apply(PooledRegistration(replace(POOLED, transfer_id="v")), 2.0) == [Reject("full")]
    assert matcher.apply(COMPLETED, 2.0) == [RELEASE, Reject("late completion")]
    assert matcher.apply(replace(COMPLETED, transfer_id="v", request_id="p2"), 2.0) == [
        ReleaseBlocks("p2"),
        Reject("full"),
    ]
    assert matcher.apply(replace(PROGRESS, transfer_id="v"), 2.0) == [Reject("full")]


class TestWriteLease:
    """F3: posted only within the lease that the decode engine's echo gives."""

    @pytest.fixture
    def matcher(self) -> Matcher:
        matcher = Matcher(engine="P", incarnation=5, rank=0, ranks=1, write_lease_s=1.5)
        matcher.apply(JOINED, 0.0)
        return matcher

    def test_without_an_echo_nothing_is_posted(self, matcher: Matcher) -> None:
        matcher.pulse(0.0)
        matcher.apply(REGISTRATION, 0.1)
        assert matcher.apply(COMPLETED, 0.2) == [CLAIMED]
        assert matcher.apply(LeaseEcho("D", 7, (("P", 5, 0, 1),)), 0.3) == [POST, STARTED]

    def test_the_registration_brings_the_first_echo(self, matcher: Matcher) -> None:
        matcher.pulse(0.0)
        matcher.apply(COMPLETED, 0.2)
        assert matcher.apply(replace(REGISTRATION, echoes=(("P", 5, 0, 1),)), 0.3) == [CLAIMED, POST, STARTED]

    def test_it_ends_after_the_pulse_was_sent_not_after_the_echo_came(self, matcher: Matcher) -> None:
        matcher.pulse(0.0)
        matcher.apply(replace(REGISTRATION, echoes=(("P", 5, 0, 1),)), 1.4)
        assert matcher.apply(COMPLETED, 1.51) == [CLAIMED]
        matcher.pulse(1.6)
        assert matcher.apply(LeaseEcho("D", 7, (("P", 5, 0, 1),)), 1.7) == [], "an old number renews nothing"
        assert matcher.apply(LeaseEcho("D", 7, (("P", 5, 0, 2),)), 1.8) == [POST, STARTED]

    @pytest.mark.parametrize(
        "echo",
        [
            LeaseEcho("D", 8, (("P", 5, 0, 1),)),
            LeaseEcho("E", 7, (("P", 5, 0, 1),)),
            LeaseEcho("D", 7, (("P", 4, 0, 1),)),
            LeaseEcho("D", 7, (("Q", 5, 0, 1),)),
            LeaseEcho("D", 7, (("P", 5, 1, 1),)),
            LeaseEcho("D", 7, (("P", 5, 0, 2),)),
            LeaseEcho("D", 7, ()),
        ],
    )
    def test_other_echoes_give_no_right(self, matcher: Matcher, echo: LeaseEcho) -> None:
        matcher.pulse(0.0)
        matcher.apply(REGISTRATION, 0.1)
        matcher.apply(COMPLETED, 0.2)
        assert matcher.apply(echo, 0.3) == []


def test_the_lease_is_renewed_while_decode_wants_it(matcher: Matcher) -> None:
    """L1: decode's queue is longer than the block lease."""
    wanted = Wanted("t", 1, "D", 7, "d1")
    matcher.apply(COMPLETED, 1.0)
    for second in range(10, 100, 10):
        assert matcher.apply(wanted, float(second)) == [TestWord.DONE], "and it is told what is here"
        assert matcher.tick(second + 9.0) == []
    assert matcher.apply(REGISTRATION, 100.0) == [CLAIMED, POST, STARTED]
    assert matcher.apply(wanted, 101.0) == [Reject("nothing to keep")], "the WRITE has no lease to renew"


class TestWord:
    """A decode engine that registers late asks how far the prefill is."""

    WANTED = Wanted("t", 1, "D", 7, "d1")
    DONE = Send("D", replace(COMPLETED, blocks=()))

    def test_it_is_told_what_is_known_and_what_changes(self, matcher: Matcher) -> None:
        assert matcher.apply(self.WANTED, 1.0) == []
        assert matcher.apply(PROGRESS, 2.0) == [Send("D", PROGRESS)]
        assert matcher.apply(self.WANTED, 2.5) == [Send("D", PROGRESS)]
        further = replace(PROGRESS, computed=96)
        assert matcher.apply(further, 3.0) == [Send("D", further)]
        assert matcher.apply(COMPLETED, 4.0) == [self.DONE]
        assert matcher.apply(self.WANTED, 4.5) == [self.DONE]
        assert matcher.apply(REGISTRATION, 5.0) == [CLAIMED, POST, STARTED]

    def test_it_is_told_of_a_failure(self, matcher: Matcher) -> None:
        matcher.apply(self.WANTED, 1.0)
        assert matcher.apply(FAILED, 2.0) == [Send("D", FAILED)]
        [again] = matcher.apply(self.WANTED, 3.0)
        assert isinstance(again, Send)
        assert isinstance(again.message, PrefillFailed)

    def test_one_rank_tells_it(self) -> None:
        second = Matcher(engine="P", incarnation=5, rank=1, ranks=2, **FOREVER)
        assert second.apply(self.WANTED, 1.0) == []
        assert second.apply(PROGRESS, 2.0) == []

    def test_nobody_else_remembers_it_for_long(self, matcher: Matcher) -> None:
        matcher.apply(self.WANTED, 1.0)
        assert matcher.tick(11.0) == [Reject("unclaimed registration")]
        assert matcher.counts["transfers"] == 0


def test_draining_tells_whoever_waits_and_takes_nothing_new(matcher: Matcher) -> None:
    """C5."""
    matcher.apply(REGISTRATION, 1.0)
    matcher.apply(replace(COMPLETED, transfer_id="u", request_id="p2"), 1.0)
    matcher.apply(replace(REGISTRATION, transfer_id="w", request_id="d3"), 1.0)
    matcher.apply(replace(COMPLETED, transfer_id="w", request_id="p3"), 1.0)
    assert matcher.apply(Drain(), 2.0) == [failure("draining"), ReleaseBlocks("p2")]
    assert matcher.apply(replace(REGISTRATION, transfer_id="v"), 3.0) == [refusal("draining", transfer_id="v")]
    assert matcher.apply(PooledRegistration(replace(POOLED, transfer_id="v")), 3.0) == [Reject("draining")]
    assert matcher.counts["writing"] == 1
    assert matcher.apply(WriteEnded("w", 1, 9), 4.0)[-1] == ReleaseBlocks("p3")
