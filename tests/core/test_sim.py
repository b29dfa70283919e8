"""The simulator itself: invariants hold, with faults or not; a seed gives the same run; what is broken is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbus.protocol import SinkLease, SourceLease
from kvbus.protocol.decode import Abandon, Arrivals, Arrived
from kvbus.protocol.decode.give_back import GiveBack
from kvbus.protocol.prefill import PostWrite, ReleaseBlocks, joiner
from kvbus.protocol.prefill.decode_peers import Sinks
from kvbus.protocol.prefill.joiner import Joiner
from kvbus.protocol.prefill.registrations import Registrations
from kvbus.protocol.prefill.transfer import Outcome, mismatch
from kvbus.sim.fake_history import SUFFIX, Giver
from kvbus.sim.faults import FAULT_KINDS, faults_of
from kvbus.sim.run import InvariantBrokenError, run_many
from kvbus.sim.virtual import run_virtual


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "kvbus")


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(kind for kind, faults in FAULT_KINDS.items() if not faults.forge_every_s))
def test_no_invariant_is_broken(kind: str) -> None:
    summary = run_many(1, 600, kind, lambda _: None)
    assert summary.transfers == 600
    ends = ("pushed", "recomputed", "computed locally", "aborted", "lost with its decode engine")
    assert sum(summary.counts[end] for end in ends) == 600
    assert summary.counts["pushed"] > 270
    assert summary.counts["history: received"] > 20


def test_without_faults_everything_is_pushed_and_history_comes_back() -> None:
    counts = run_many(5, 200, "none", lambda _: None).counts
    assert counts["pushed"] == 200
    assert counts["history: received"] > 20
    assert counts["history: failed"] == 0


def test_a_seed_gives_the_same_run() -> None:
    one, two = (run_virtual(11, faults_of("all"), 150) for _ in range(2))
    assert one == two


def renew_only(self: Any, heard: Any) -> bool:
    self._sinks.hear(heard)
    return True


def forget_attempts(self: Any, registration: Any, now: float, *, direct: bool) -> Any:
    if (transfer := self._transfers.get(registration.transfer_id)) is not None:
        transfer.lowest_attempt = 0
    return REGISTER(self, registration, now, direct=direct)


def release_at_once(self: Any, key: str, transfer: Any, now: float) -> Any:
    effects = MATCH(self, key, transfer, now)
    posted = [ReleaseBlocks(effect.job.source_request) for effect in effects if isinstance(effect, PostWrite)]
    return effects + posted


def give_history_back_at_once(self: Any, receive: Any, reason: str, now: float) -> Any:
    if not receive.registration.transfer_id.endswith(SUFFIX):
        return CANCEL(self, receive, reason, now)
    self._receives.remove(receive.request_id)
    return [Abandon(receive.request_id, reason)]


def withdraw_under_a_write(self: Any, word: Any) -> Any:
    transfer = self._transfers.get(word.transfer_id)
    return [] if transfer is None else self._transfers.end(word.transfer_id, transfer, Outcome.CANCELLED)


def whatever_its_digest(registration: Any, completion: Any, sink: Any) -> str:
    of_history = registration.transfer_id.endswith(SUFFIX)
    return mismatch(replace(registration, digest="") if of_history else registration, completion, sink)


REGISTER, MATCH, CANCEL = Registrations.register, Joiner.match, GiveBack.cancel


def begin_with_the_echo(self: Any, sink: str, incarnation: int, number: int) -> None:
    self._until[sink, incarnation] = self._sent_at[self._number] + 5


LIMIT = 20_000  # each is found long before
Patch = tuple[Any, str, Any]
MUTATIONS: dict[str, tuple[str, list[Patch]]] = {
    "F1: blocks go back without waiting for anybody": ("kill", [(SinkLease, "safe_at", lambda *_: float("-inf"))]),
    "F2: an attempt that is over may be written": ("rebind", [(Registrations, "register", forget_attempts)]),
    "F2: an older incarnation of the sink is written": (
        "restart",
        [(Sinks, "get", lambda self, engine, _: self._joined.get(engine)), (Sinks, "is_stale", lambda *_: False)],
    ),
    "F2: what an older epoch registered is not forgotten": ("partition", [(Registrations, "hear", renew_only)]),
    "F2: source blocks go back under the WRITE": ("none", [(Joiner, "match", release_at_once)]),
    "F3: posted without a lease": ("partition", [(SourceLease, "until", lambda *_: float("inf"))]),
    "F3: the lease begins when the echo comes": ("partition", [(SourceLease, "echoed", begin_with_the_echo)]),
    "F4: a cancel is acknowledged under a WRITE": (
        "abort",
        [(Registrations, "cancel", lambda self, cancel, now, direct: [self._answers.cancelled(cancel)])],
    ),
    "F5: a late notification is reported again": (
        "all",
        [(Arrivals, "land", lambda self, landed: [Arrived(landed.request_id, ok=True)])],
    ),
    "F6: block ids are not checked": ("all", [(joiner, "mismatch", lambda *_: "")]),
    "history: decode goes on while it is read": ("all", [(Giver, "holds_back", lambda *_: False)]),
    "history: withdrawn under a WRITE": ("all", [(Registrations, "release_unserved", withdraw_under_a_write)]),
    "history: prefill reuses its blocks without waiting": ("abort", [(GiveBack, "cancel", give_history_back_at_once)]),
    "history: of another prompt": ("all", [(joiner, "mismatch", whatever_its_digest)]),
    "history: offered again by a later attempt": (
        "rebind",
        [(Giver, "is_asked", lambda _, request: 0 < request.cached_blocks < request.prompt_blocks)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_fence_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, patches = MUTATIONS[mutation]
    for owner, name, broken in patches:
        monkeypatch.setattr(owner, name, broken)
    with pytest.raises(InvariantBrokenError, match="see it again with: kvbus sim --seed") as caught:
        run_many(1, LIMIT, kind, lambda _: None)
    print(f"{mutation} -> {caught.value}")
