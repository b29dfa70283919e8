"""Write leases: what each side may conclude from numbers that it sent, heard and echoed. Times are seconds."""

from __future__ import annotations

from kvbus.protocol import SinkLease, SourceLease, term_s

NEVER = float("-inf")


class TestAPrefillRank:
    def test_may_write_for_so_long_after_the_pulse_that_was_echoed(self) -> None:
        lease = SourceLease(1.5)
        assert [lease.pulse(10.0), lease.pulse(10.5)] == [1, 2]
        assert lease.until("D", 7) == NEVER
        lease.echoed("D", 7, 1)
        assert (lease.until("D", 7), lease.until("D", 8), lease.until("E", 7)) == (11.5, NEVER, NEVER)
        lease.echoed("D", 7, 2)
        lease.echoed("D", 7, 1)
        assert lease.until("D", 7) == 12.0, "an old echo takes nothing back"

    def test_numbers_its_pulses_by_chance(self) -> None:
        numbers = iter((77, 5))
        lease = SourceLease(1.5, lambda: next(numbers))
        assert [lease.pulse(10.0), lease.pulse(11.0)] == [77, 5]

    def test_a_number_that_was_never_sent_gives_no_right(self) -> None:
        lease = SourceLease(1.5)
        lease.pulse(10.0)
        lease.echoed("D", 7, 2)
        assert lease.until("D", 7) == NEVER


class TestADecodeEngine:
    def test_echoes_what_it_heard_last_of_each_rank_of_an_engine(self) -> None:
        lease = SinkLease()
        for source, number in ((("P", 3, 0), 5), (("P", 3, 1), 6), (("Q", 1, 0), 9), (("P", 3, 0), 7)):
            lease.hear(source, number, 10.0)
        assert lease.echo("P") == (("P", 3, 0, 7), ("P", 3, 1, 6))

    def test_is_safe_a_term_after_it_heard_what_it_echoed_last(self) -> None:
        lease = SinkLease(1.5, 2.5)
        lease.hear(("P", 3, 0), 1, 10.0)
        assert lease.safe_at("P") == NEVER, "nothing was echoed"
        lease.echo("P")
        lease.hear(("P", 3, 0), 2, 20.0)
        assert lease.safe_at("P") == 10.0 + term_s(1.5, 2.5), "what is heard and not echoed gives no right"

    def test_ranks_that_are_known_to_have_ended_do_not_count(self) -> None:
        lease = SinkLease(1.5, 2.5)
        lease.hear(("P", 3, 0), 1, 10.0)
        lease.hear(("P", 3, 1), 1, 11.0)
        lease.echo("P")
        assert lease.safe_at("P", 3, {1}) == 10.0 + term_s(1.5, 2.5)
        assert lease.safe_at("P", 3, {0, 1}) == NEVER
        assert lease.safe_at("P", 4, {0, 1}) == 11.0 + term_s(1.5, 2.5), "of another incarnation"

    def test_knows_the_incarnation_that_it_heard_last(self) -> None:
        lease = SinkLease()
        assert lease.incarnation("P") == 0
        lease.hear(("P", 3, 0), 1, 10.0)
        lease.hear(("P", 4, 0), 1, 11.0)
        assert lease.incarnation("P") == 4

    def test_forgets_what_is_gone_once_nothing_of_it_can_be_written(self) -> None:
        lease, safe_at = SinkLease(1.5, 2.5), 10.0 + term_s(1.5, 2.5)
        for source in (("P", 3, 0), ("P", 4, 0), ("Q", 3, 0)):
            lease.hear(source, 1, 10.0)
        for engine in ("P", "Q"):
            lease.echo(engine)
        lease.forget("P", 3, safe_at - 0.01)
        assert len(lease.echo("P")) == 2, "it may still write"
        lease.forget("P", 3, safe_at)
        assert lease.echo("P") == (("P", 4, 0, 1),)
        assert lease.echo("Q") == (("Q", 3, 0, 1),)
        lease.forget("P", 5, safe_at)
        assert lease.echo("P") == (), "and every incarnation before it"
