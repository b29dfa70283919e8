"""What the tools make of what they hear: rates and waits, what is pending, and lines."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ConfigError
from kvbus.tools.lines import Selection, Undecodable, json_line, line, parse_kinds
from kvbus.tools.listen import BusMessage
from kvbus.tools.pending import PendingTable, Stage
from kvbus.tools.traffic import GONE_AFTER_S, MIB, RATE_WINDOW_S, WINDOW_S, Traffic, quantile
from kvbus.wire import (
    HISTORY_SUFFIX,
    KINDS,
    Bye,
    Cancel,
    Delivered,
    Heartbeat,
    LeaseEcho,
    Message,
    MetadataReply,
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
    Wanted,
)

BEAT = Heartbeat("P", 5, 1, Role.PREFILL, State.READY, 1, "m", free_blocks=30, total_blocks=40, requests=2)
REGISTRATION = Registration("t", 1, "D", 7, "d1", (((10, 3),),), 96)
COMPLETED = PrefillCompleted("t", "P", 5, "p1", (((0, 4),),), 96)
STARTED = TransferStarted("t", "P", 5, 1, 0, 1, "d1")
DONE = TransferDone("t", "P", 5, 1, 0, 1, "d1", 3, MIB, "decode", 0.2, 0.001, 0.01)
FAILED = TransferFailed("t", "P", 5, 1, 0, 1, "d1", "broken")
DELIVERED = Delivered("t", 1, "D", 7, "d1")
CANCEL = Cancel("t", 1, "D", 7, "d1", "aborted")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class TestTraffic:
    def test_rates_are_of_whole_transfers_and_all_ranks_bytes(self) -> None:
        traffic = Traffic(100.0)
        for second in range(20):
            for rank in range(2):
                traffic.hear(replace(DONE, transfer_id=f"t{second}", rank=rank, ranks=2), 100.0 + second)
        got = traffic.snapshot(120.0)
        # of the last ten seconds the one that has just begun is empty
        assert got.transfers_per_s == pytest.approx(9 / (RATE_WINDOW_S - 1))
        assert got.mib_per_s == pytest.approx(18 / (RATE_WINDOW_S - 1))
        assert (got.transfers, got.written_bytes) == (20, 40 * MIB)
        assert traffic.snapshot(140.0).transfers_per_s == 0

    def test_who_has_listened_for_a_moment_only_divides_by_that(self) -> None:
        traffic = Traffic(100.0)
        for number in range(6):
            traffic.hear(replace(DONE, transfer_id=f"t{number}"), 101.0)
        assert traffic.snapshot(102.0).transfers_per_s == pytest.approx(3.0)

    def test_what_is_said_again_counts_once(self) -> None:
        traffic = Traffic(0.0)
        failed = PrefillFailed("t", "P", 5, "p1", "gone")
        for message in (DONE, FAILED, replace(FAILED, rank=1), failed) * 3:
            traffic.hear(message, 1.0)
        got = traffic.snapshot(1.0)
        assert (got.transfers, got.failures) == (1, 2)

    def test_to_have_no_history_is_no_failure(self) -> None:
        traffic = Traffic(0.0)
        traffic.hear(PrefillFailed("t" + HISTORY_SUFFIX, "D", 5, "d1", "nothing is cached"), 1.0)
        assert traffic.snapshot(1.0).failures == 0

    def test_waits_are_by_late_side_and_of_the_last_minute(self) -> None:
        traffic = Traffic(0.0)
        for number in range(10):
            done = replace(DONE, transfer_id=f"d{number}", match_wait_s=(number + 1) / 1000)
            traffic.hear(done, 1.0)
        traffic.hear(replace(DONE, late_side="prefill", match_wait_s=0.5), 30.0)
        traffic.hear(replace(DONE, transfer_id="odd", late_side="nobody"), 30.0)
        prefill, decode, queue, write = traffic.snapshot(31.0).waits
        assert (prefill.count, prefill.p50_ms, prefill.max_ms) == (1, 500.0, 500.0)
        assert (decode.count, decode.p50_ms, decode.p90_ms, decode.max_ms) == (10, 5.0, 9.0, 10.0)
        assert (queue.count, queue.p50_ms, write.count, write.p90_ms) == (12, 1.0, 12, 10.0)
        assert [row.count for row in traffic.snapshot(2.0 + WINDOW_S).waits] == [1, 0, 2, 2]

    def test_engines_come_speak_and_go(self) -> None:
        traffic = Traffic(0.0)
        traffic.hear(replace(BEAT, engine="D", role=Role.DECODE), 0.0)
        traffic.hear(BEAT, 0.0)
        traffic.hear(replace(BEAT, number=2, requests=7, state=State.DRAINING), 1.0)
        traffic.hear(DONE, 1.0)
        traffic.hear(FAILED, 1.0)
        first, second = traffic.snapshot(2.0).engines
        assert (first.engine, first.state, first.requests, first.heartbeat_age_s) == ("P", "draining", 7, 1.0)
        assert (first.free_blocks, first.total_blocks, first.transfers_per_s, first.failures) == (30, 40, 0.5, 1)
        assert second.engine == "D"
        traffic.hear(Bye("P", 5), 3.0)
        assert [row.state for row in traffic.snapshot(4.0).engines] == ["gone: left", "ready"]
        assert [row.state for row in traffic.snapshot(7.0).engines] == ["gone: left", "gone: silent"]
        traffic.hear(replace(BEAT, incarnation=6), 8.0)
        assert [row.state for row in traffic.snapshot(8.0).engines] == ["ready", "gone: silent"]
        assert traffic.snapshot(9.0 + GONE_AFTER_S + WINDOW_S).engines[0].state == "gone: silent"
        assert traffic.snapshot(20.0 + 2 * WINDOW_S).engines == ()

    def test_nobody_is_gone_because_we_were_deaf(self) -> None:
        traffic = Traffic(0.0)
        traffic.hear(BEAT, 0.0)
        traffic.excuse_silence(30.0)
        assert traffic.snapshot(30.0).engines[0].state == "ready"

    def test_an_older_incarnation_is_not_heard(self) -> None:
        traffic = Traffic(0.0)
        traffic.hear(BEAT, 0.0)
        traffic.hear(replace(BEAT, incarnation=4, requests=9), 1.0)
        traffic.hear(Bye("P", 4), 1.0)
        [row] = traffic.snapshot(1.0).engines
        assert (row.state, row.requests) == ("ready", 2)

    def test_quantiles(self) -> None:
        assert quantile([], 0.5) == 0.0
        assert quantile([1.0], 0.9) == 1.0
        assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.75, 0.9, 1.0)] == [1, 2, 3, 4, 4]

    def test_engines_that_nobody_knows_do_not_fill_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("MAX_PEERS", "MAX_SAMPLES", "MAX_REMEMBERED"):
            monkeypatch.setattr(f"kvbus.tools.traffic.{name}", 10)
        traffic = Traffic(0.0)
        for number in range(100):
            traffic.hear(replace(DONE, transfer_id=f"t{number}", source_engine=f"P{number}"), 1.0)
            traffic.hear(replace(FAILED, transfer_id=f"t{number}", source_engine=f"P{number}"), 1.0)
        got = traffic.snapshot(1.0)
        assert (got.transfers, got.failures, got.waits[1].count) == (100, 100, 10)
        assert [len(table) for table in (traffic._rates, traffic._failures, traffic._said)] == [10, 10, 10]


class TestPending:
    def stage_after(self, *messages: Message) -> Stage | None:
        table = PendingTable()
        for number, message in enumerate(messages):
            table.hear(message, float(number))
        rows = table.pending(100.0)
        return rows[0].stage if rows else None

    @pytest.mark.parametrize(
        ("messages", "stage"),
        [
            ([REGISTRATION], Stage.NO_COMPLETION),
            ([REGISTRATION, RegistrationAck("t", "P", 5, 1, 0, 1, "d1")], Stage.NO_COMPLETION),
            ([COMPLETED], Stage.NO_REGISTRATION),
            ([COMPLETED, Wanted("t", 1, "D", 7, "d1")], Stage.NO_REGISTRATION),
            ([REGISTRATION, COMPLETED], Stage.NOT_POSTED),
            ([COMPLETED, REGISTRATION, STARTED], Stage.WRITING),
            ([STARTED], Stage.WRITING),
            ([COMPLETED, REGISTRATION, STARTED, DONE], Stage.NOT_DELIVERED),
            ([replace(DONE, ranks=2)], Stage.WRITING),
            ([replace(DONE, ranks=2), replace(DONE, ranks=2, rank=1)], Stage.NOT_DELIVERED),
            ([COMPLETED, REGISTRATION, STARTED, DONE, DELIVERED], None),
            ([COMPLETED, REGISTRATION, STARTED, DELIVERED, DONE], None),
            ([COMPLETED, REGISTRATION, DELIVERED, REGISTRATION, COMPLETED], None),
            ([REGISTRATION, CANCEL], None),
            ([REGISTRATION, CANCEL, REGISTRATION], None),
            ([REGISTRATION, COMPLETED, replace(CANCEL, release=False)], Stage.NO_REGISTRATION),
            ([REGISTRATION, replace(CANCEL, attempt=2), REGISTRATION], None),
            ([REGISTRATION, FAILED], None),
            ([REGISTRATION, PrefillFailed("t", "P", 5, "p1", "x")], None),
            ([REGISTRATION, RegistrationAck("t", "P", 5, 1, 0, 1, "d1", refused="full")], None),
            # Another attempt takes over: with the KV that is kept, or from another prefill engine.
            ([COMPLETED, REGISTRATION, FAILED, replace(REGISTRATION, attempt=2)], Stage.NOT_POSTED),
            ([COMPLETED, REGISTRATION, DONE, replace(REGISTRATION, attempt=2), DONE], Stage.NOT_POSTED),
            ([REGISTRATION, replace(REGISTRATION, attempt=2), CANCEL], Stage.NO_COMPLETION),
            ([COMPLETED, CANCEL, replace(COMPLETED, source_engine="P2")], Stage.NO_REGISTRATION),
            ([COMPLETED, CANCEL, replace(REGISTRATION, attempt=2)], Stage.NO_COMPLETION),
            ([Wanted("t", 1, "D", 7, "d1")], None),
            ([PrefillProgress("t", "P", 5, "p1", 0, 96)], None),
        ],
    )
    def test_what_a_transfer_waits_for(self, messages: list[Message], stage: Stage | None) -> None:
        assert self.stage_after(*messages) == stage

    def test_the_old_prefill_engines_failure_does_not_end_what_another_took_over(self) -> None:
        other = replace(COMPLETED, source_engine="P2")
        failed = PrefillFailed("t", "P", 5, "p1", "x")
        assert self.stage_after(COMPLETED, other, failed) == Stage.NO_REGISTRATION

    def test_rows_are_oldest_first_and_say_what_is_known(self) -> None:
        table = PendingTable()
        table.hear(replace(REGISTRATION, transfer_id="young"), 5.0)
        table.hear(COMPLETED, 2.0)
        table.hear(replace(COMPLETED, blocks=()), 3.0)
        table.hear(Wanted("t", 1, "D", 7, "d1"), 3.0)
        old, young = table.pending(6.0)
        assert (old.transfer_id, old.age_s, old.attempt, old.source_engine, old.sink_engine) == ("t", 4, None, "P", "D")
        assert (old.blocks, old.prompt_tokens) == (4, 96)
        assert (young.transfer_id, young.age_s, young.attempt, young.source_engine) == ("young", 1, 1, "")
        assert (young.blocks, young.prompt_tokens, young.sink_engine) == (3, 96, "D")

    def test_what_there_is_no_room_for_is_counted_and_the_oldest_stay(self) -> None:
        table = PendingTable(max_open=2)
        for number in range(5):
            table.hear(replace(REGISTRATION, transfer_id=f"t{number}"), float(number))
        assert [row.transfer_id for row in table.pending(9.0)] == ["t0", "t1"]
        assert table.unkept == 3

    def test_any_order_is_survived(self) -> None:
        words: list[Message] = [REGISTRATION, COMPLETED, STARTED, DONE, FAILED, DELIVERED, CANCEL]
        words += [replace(each, attempt=2) for each in (REGISTRATION, STARTED, DONE, FAILED, DELIVERED, CANCEL)]  # type: ignore[type-var]
        words += [replace(CANCEL, release=False), Wanted("t", 1, "D", 7, "d1"), PrefillFailed("t", "P", 5, "p", "x")]
        words += [RegistrationAck("t", "P2", 6, 1, 0, 1, "d1", refused="x"), replace(COMPLETED, source_engine="P2")]
        chance = random.Random(1)
        for _ in range(2000):
            table = PendingTable()
            for at in range(12):
                table.hear(chance.choice(words), float(at))
                assert len(table.pending(float(at))) <= 1


class TestLines:
    def test_a_registration(self) -> None:
        message = replace(
            REGISTRATION,
            blocks=(((10, 20), (40, 4)), ((1, 1),)),
            digest="0123456789abcdef",
            traceparent=PARENT,
            sink_incarnation=1748937432123456789,
            echoes=(("P", 5, 0, 9),),
        )
        assert line("08:10:34.123", "reg.P", message) == (
            "08:10:34.123 reg.P  reg  transfer_id=t attempt=1 sink_engine=D sink_incarnation=…456789 request_id=d1 "
            "blocks=25 blocks in 2 groups prompt_tokens=96 cached_tokens=0 digest=01234567… "
            "traceparent=00-0af7651916cd4… source_incarnation=0 echoes=1 echoes epoch=0 takes_token=False"
        )

    def test_what_cannot_be_decoded(self) -> None:
        said = BusMessage(0.0, "reg", b"\xff\x00junk").read()
        assert isinstance(said, Undecodable)
        assert line("08:10", "reg", said) == "08:10 reg  ? not msgpack within bounds: ExtraData, 6 bytes"
        assert json.loads(json_line(1.0, "reg", said)) == {
            "time": 1.0,
            "subject": "reg",
            "kind": None,
            "error": "not msgpack within bounds: ExtraData",
            "bytes": 6,
        }

    def test_json_has_every_field_whole(self) -> None:
        got = json.loads(json_line(1.0, "reg.P", replace(REGISTRATION, traceparent=PARENT)))
        assert {field.name for field in fields(Registration)} | {"time", "subject", "kind"} == set(got)
        assert (got["kind"], got["traceparent"], got["blocks"]) == ("reg", PARENT, [[[10, 3]]])
        assert json.loads(json_line(1.0, "x", MetadataReply("P", 5, 0, b"\x00\xff")))["payload"] == "AP8="

    def test_no_field_of_a_message_hides_when_where_or_what(self) -> None:
        for cls in KINDS.values():
            assert not {"time", "subject", "kind"} & {field.name for field in fields(cls)}

    def test_control_sequences_and_line_ends_are_escaped(self) -> None:
        text = line("t", "reg\n.P", replace(CANCEL, reason="\x1b[2J\nreg x", sink_engine="a b"))
        assert text.isprintable()
        assert r"reason='\x1b[2J\nreg x'" in text
        assert "sink_engine='a b'" in text

    @given(st.binary(max_size=200), st.text(max_size=50))
    def test_any_payload_gives_one_line(self, payload: bytes, subject: str) -> None:
        said = BusMessage(0.0, subject, payload).read()
        assert line("t", subject, said).isprintable()
        assert "\n" not in json_line(0.0, subject, said)

    @given(st.text(max_size=512), st.text(max_size=512))
    def test_any_text_gives_one_line_of_bounded_length(self, one: str, other: str) -> None:
        text = line("t", "s", replace(CANCEL, transfer_id=one, reason=other))
        assert text.isprintable()
        assert len(text) < 5000

    def test_noise_is_left_out_unless_it_is_asked_for(self) -> None:
        echo = LeaseEcho("D", 7, ())
        assert [Selection().wants(said) for said in (BEAT, echo, CANCEL)] == [False, False, True]
        assert Selection(noise=True).wants(BEAT)
        chosen = Selection(parse_kinds("hb, done"))
        assert [chosen.wants(said) for said in (BEAT, DONE, CANCEL, Undecodable("x", 1))] == [True, True, False, False]
        assert Selection().wants(Undecodable("x", 1))
        assert [Selection(transfer_id="t").wants(said) for said in (CANCEL, replace(CANCEL, transfer_id="u"))] == [1, 0]
        assert not Selection(transfer_id="t", noise=True).wants(BEAT)

    def test_kinds_are_named_without_what_shells_take_for_a_pattern(self) -> None:
        assert parse_kinds("") == frozenset()
        assert parse_kinds("drain?,meta,prefill_failed") == {"drain", "meta", "prefill_failed"}
        with pytest.raises(
            ConfigError, match=r"--kind='registration'; allowed: ack, bye, .*, reg, release, started, wanted, who"
        ):
            parse_kinds("reg,registration")
