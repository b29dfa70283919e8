"""What both halves mark of a conversation's history, and that all of it is in the trace of the request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from support.fake_engine import COMPAT, Boot, FakeEngine, Request, legs
from support.kept import Kept
from support.waiting import eventually_sync

from kvbus.bus import MemoryBroker, MemoryBus, Node
from kvbus.protocol import Membership
from kvbus.tools.view import problems, views_of
from kvbus.tools.why import why
from kvbus.trace import HISTORY_STAGES, Collector, HistoryOutcome, Outcome, Path
from kvbus.wire import Marks, Subjects

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SUBJECTS = Subjects("default")
P_BLOCKS, D_BLOCKS = [1, 2, 3], [10, 11, 12]
PROMPT, HISTORY, BLOCK = 96, 64, 32  # tokens


@dataclass
class Turn:
    """One request between both engines, of which D has the first ``HISTORY`` tokens; driven as vLLM does."""

    prefill: FakeEngine
    decode: FakeEngine
    p_leg: Request
    d_leg: Request

    def begin(self, cached_tokens: int = HISTORY) -> None:
        """Both legs arrive, and D's has its blocks."""
        self.prefill.arrive(self.p_leg)
        self.decode.arrive(self.d_leg)
        tokens = self.decode.scheduler.tokens_from_outside(self.d_leg, cached_tokens)
        assert tokens == PROMPT - cached_tokens
        self.decode.scheduler.allocated(self.d_leg, [D_BLOCKS[cached_tokens // BLOCK :]], tokens, [D_BLOCKS])

    def ask(self, computed_tokens: int = 0) -> int:
        """What vLLM of P is told in the end."""
        found: list[int] = []

        def asked() -> bool:
            self.decode.step()
            tokens = self.prefill.scheduler.tokens_from_outside(self.p_leg, computed_tokens)
            found.extend([] if tokens is None else [tokens])
            return bool(found)

        eventually_sync(asked)
        return found[0]

    def take(self) -> bool:
        """P allocates; returns whether the history has come."""
        self.prefill.scheduler.allocated(self.p_leg, [P_BLOCKS[:2]], HISTORY, [P_BLOCKS[:2]])
        eventually_sync(lambda: self._has_received(self.prefill, self.p_leg, self.decode))
        return self.prefill.received[self.p_leg.request_id]

    def end(self, computed_tokens: int) -> None:
        """P computes the rest in one step, and D gives its first token."""
        self.p_leg.num_computed_tokens = computed_tokens
        self.prefill.step({self.p_leg.request_id: PROMPT - computed_tokens})
        self.p_leg.num_computed_tokens = PROMPT
        self.prefill.scheduler.finished(self.p_leg, [P_BLOCKS], prefilled=True)
        eventually_sync(lambda: self._has_received(self.decode, self.d_leg, self.prefill))
        self.decode.step({self.d_leg.request_id: 1})
        self.decode.start_decoding(self.d_leg)

    @staticmethod
    def _has_received(engine: FakeEngine, leg: Request, other: FakeEngine) -> bool:
        """Whether every rank of ``engine`` has; both engines are stepped."""
        other.step()
        return engine.has_received(leg.request_id)


@dataclass
class Traces:
    """What a collector makes of everybody's marks, and the marks themselves."""

    kept: Kept = field(default_factory=Kept)
    paths: list[Path] = field(default_factory=list)
    heard: list[Marks] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [name for message in self.heard for _, name, _, _ in message.marks]


@pytest.fixture
def traces(broker: MemoryBroker) -> Iterator[Traces]:
    found = Traces()
    node = Node(MemoryBus(broker), SUBJECTS, name="collect", membership=Membership(), hears=())
    collector = Collector(node, [found.kept], found.paths.append, adopts=True)
    node.listen(SUBJECTS.marks("*"), Marks, found.heard.append)
    node.start()
    yield found
    node.close()
    collector.close()


def turn_of(prefill: FakeEngine, decode: FakeEngine, traceparent: str = SAMPLED) -> Turn:
    p_leg, d_leg = legs()
    for leg, about in ((p_leg, {"history_engine_id": "D"}), (d_leg, {"history": True})):
        assert leg.kv_transfer_params is not None
        leg.kv_transfer_params.update(about, traceparent=traceparent)
        leg.prompt_token_ids = list(range(PROMPT))
    p_leg.num_computed_tokens = 0
    return Turn(prefill, decode, p_leg, d_leg)


@pytest.fixture(params=[1, 2])
def pair(request: pytest.FixtureRequest, boot: Boot, patient: None) -> tuple[FakeEngine, FakeEngine]:
    compat = (("block_size", str(BLOCK)), *COMPAT)
    prefill, decode = (boot(name, ranks=request.param, options={"history": True}, compat=compat) for name in ("P", "D"))
    prefill.decodes_at_once = decode.decodes_at_once = False
    eventually_sync(lambda: decode.knows(prefill) and prefill.knows(decode))
    return prefill, decode


@pytest.mark.slow
def test_history_that_comes_is_in_the_trace_of_its_request(pair: tuple[FakeEngine, FakeEngine], traces: Traces) -> None:
    turn = turn_of(*pair)
    turn.begin()
    assert turn.ask() == HISTORY
    assert turn.take()
    turn.end(HISTORY)
    eventually_sync(lambda: traces.kept.spans)
    [view], [path] = views_of(traces.kept.spans), traces.paths
    assert problems(view) == []
    stages = [stage.name for stage in view.stages]
    assert stages[stages.index("prefill.queue") :][:6] == [
        "prefill.queue",
        *HISTORY_STAGES,
        "prefill.queue",
        "prefill.compute",
    ]
    assert path.outcome is Outcome.PUSHED
    assert path.history is not None
    assert (path.history.engine, path.history.outcome) == ("D", HistoryOutcome.RECEIVED)
    assert (path.history.tokens, path.history.missed_tokens, path.history.computed_tokens) == (64, 0, 32)
    assert "64 tokens of history came from D in" in why(view).text
    assert {message.transfer_id for message in traces.heard} == {"t", "t~history"}
    assert traces.names.count("history received") == traces.names.count("history asked") == 1


@pytest.mark.slow
def test_history_that_is_too_late_is_told_with_what_decode_had(
    pair: tuple[FakeEngine, FakeEngine], traces: Traces
) -> None:
    turn = turn_of(*pair)
    turn.prefill.arrive(turn.p_leg)
    eventually_sync(lambda: turn.prefill.scheduler.tokens_from_outside(turn.p_leg, 0) == 0)
    turn.begin()
    turn.end(0)
    eventually_sync(lambda: traces.kept.spans)
    [view], [path] = views_of(traces.kept.spans), traces.paths
    assert problems(view) == []
    assert [stage.name for stage in view.stages if stage.name in HISTORY_STAGES] == ["history.ask"]
    assert path.history is not None
    assert (path.history.outcome, path.history.missed_tokens) == (HistoryOutcome.DECLINED, HISTORY)
    assert path.history.reason == "it did not answer in time"


def test_history_that_does_not_come_says_why(pair: tuple[FakeEngine, FakeEngine], traces: Traces) -> None:
    turn = turn_of(*pair)
    turn.p_leg.prompt_token_ids = list(range(1, PROMPT + 1))
    turn.begin()
    assert turn.ask() == HISTORY
    assert not turn.take()
    eventually_sync(lambda: "history failed" in traces.names)
    [note] = {note for message in traces.heard for _, name, _, note in message.marks if name == "history failed"}
    assert "different prompts" in note
    assert "history received" not in traces.names


def test_an_engine_that_cannot_be_asked_is_named(pair: tuple[FakeEngine, FakeEngine], traces: Traces) -> None:
    turn = turn_of(*pair)
    assert turn.p_leg.kv_transfer_params is not None
    turn.p_leg.kv_transfer_params["history_engine_id"] = "E"
    turn.prefill.arrive(turn.p_leg)
    assert turn.ask() == 0
    eventually_sync(lambda: "history not asked" in traces.names)
    notes = [note for message in traces.heard for _, name, _, note in message.marks if name == "history not asked"]
    assert notes == ["decode engine E is not on the bus"]
    assert "history asked" not in traces.names


def test_blocks_that_are_not_there_at_once_are_marked_once(pair: tuple[FakeEngine, FakeEngine], traces: Traces) -> None:
    turn = turn_of(*pair)
    turn.begin()
    assert [turn.ask() for _ in range(5)] == [HISTORY] * 5, "vLLM asks in every step while it has no blocks"
    assert turn.take()
    eventually_sync(lambda: "history received" in traces.names)
    assert traces.names.count("history offered") == traces.names.count("history registering") == 1


def test_history_of_who_is_not_sampled_leaves_no_mark(pair: tuple[FakeEngine, FakeEngine], traces: Traces) -> None:
    turn = turn_of(*pair, traceparent=SAMPLED[:-1] + "0")
    turn.begin()
    assert turn.ask() == HISTORY
    assert turn.take()
    turn.end(HISTORY)
    other, _ = legs("second")
    assert other.kv_transfer_params is not None
    other.kv_transfer_params["traceparent"] = SAMPLED
    turn.prefill.scheduler.arrived(other)
    eventually_sync(lambda: traces.heard)
    assert {message.transfer_id for message in traces.heard} == {"second"}
