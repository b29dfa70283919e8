"""What vLLM does in a decode engine, played: requests queue, wait for their KV, abort, run, and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvbus.engine import Abandon, Expect, Item
from kvbus.protocol.decode import Arrived
from kvbus.sim.faults import Violation
from kvbus.sim.plane import NUM_BLOCKS, owner_tag
from kvbus.sim.played import TOKENS_PER_BLOCK, Played
from kvbus.sim.scene import Scene
from kvbus.sim.stage import Ticket
from kvbus.wire import Cancel, Heartbeat, Registration, Wanted, blocks


class SinkPort(Protocol):
    """What :class:`kvbus.engine.decode_scheduler.SinkScheduler` is to vLLM's thread; see there."""

    def why_not(self, hint: str) -> str: ...

    def register(self, registration: Registration, hint: str) -> None: ...

    def received(self, request_id: str) -> None: ...

    def aborted(self, request_id: str) -> None: ...

    def first_token(self, request_id: str) -> None: ...

    def rebound(self, request_id: str, attempt: int, engine: str) -> None: ...

    def unwanted(self, cancel: Cancel, hint: str) -> None: ...

    def want(self, wanted: Wanted, hint: str) -> None: ...


@dataclass(slots=True)
class _Receive:
    ticket: Ticket
    taken: list[int]
    ok: bool = True
    aborted: bool = False
    rebound: tuple[int, str] | None = None
    landed: set[int] = field(default_factory=set)


class PlayedDecode(Played):
    """A decode engine."""

    def __init__(self, scene: Scene, own: Heartbeat, submit: Callable[[int, Item], None], sink: SinkPort) -> None:
        super().__init__(scene, own, submit)
        self._sink = sink
        self._queue: list[Ticket] = []
        self._receives: dict[str, _Receive] = {}
        self._running: dict[str, Ticket] = {}
        self._orphans: dict[str, Ticket] = {}
        self._wanted_at = 0.0

    def leftovers(self) -> dict[str, int]:
        waiting = len(self._queue) + len(self._orphans)
        return {"queued": waiting, "receives": len(self._receives), "running": len(self._running)}

    def take(self, ticket: Ticket) -> None:
        """The decode leg has arrived."""
        if not self.alive:
            self._end(ticket, "lost with its decode engine")
            return
        self._queue.append(ticket)
        self._schedule()

    def kill(self) -> None:
        super().kill()
        receiving = [each.ticket for each in self._receives.values()]
        for ticket in [*self._queue, *self._orphans.values(), *receiving, *self._running.values()]:
            if ticket.ended or not ticket.lost():
                self._end(ticket, "lost with its decode engine")

    def rebind(self, ticket: Ticket, attempt: int, engine: str) -> None:
        """The router has given this request's prefill to ``engine``."""
        request_id = self._about(ticket)["request_id"]
        if (receive := self._receives.get(request_id)) is not None and not receive.aborted:
            receive.rebound = (attempt, engine)
            self._sink.rebound(request_id, attempt, engine)
        elif ticket in self._queue or request_id in self._orphans:
            ticket.attempt, ticket.hint = attempt, engine
            if self._orphans.pop(request_id, None) is not None:
                self._queue.insert(0, ticket)
                self._schedule()

    def tick(self) -> None:
        self._schedule()
        if self.scene.stage.now >= self._wanted_at:
            self._wanted_at = self.scene.stage.now + self.scene.pace.block_lease_s / 3
            for ticket in self._queue:
                self._sink.want(Wanted(**self._about(ticket)), ticket.hint)

    def abandon(self, request_id: str) -> None:
        """kvbus has given this receive up; the ranks report it, unless they have already."""
        self.scene.stage.counts["receives given up"] += 1
        self._tell_ranks(Abandon(request_id))

    def report(self, rank: int, arrivals: Sequence[Arrived]) -> None:
        """A rank says that these receives are over."""
        for arrived in arrivals:
            receive = self._receives.get(arrived.request_id)
            if receive is None or rank in receive.landed:
                raise Violation(f"{self.own.engine} reported {arrived.request_id} twice: vLLM dies of it")
            receive.landed.add(rank)
            receive.ok = receive.ok and arrived.ok
            if len(receive.landed) == self.own.tp_size:
                self._finish(arrived.request_id, receive)

    def _schedule(self) -> None:
        while self._queue and self.alive:
            ticket = self._queue[0]
            waited_s = self.scene.stage.now - ticket.started
            if ticket.abort_after_s is not None and waited_s > ticket.abort_after_s:
                self._queue.pop(0)
                self._decline(ticket, "finished before it was scheduled")
                self._end(ticket, "aborted")
            elif reason := self._sink.why_not(ticket.hint):
                self._queue.pop(0)
                self._decline(ticket, reason)
                self._compute(ticket, "computed locally")
            else:
                request_id = self._about(ticket)["request_id"]
                tag = owner_tag(request_id, ticket.attempt)
                taken = self.arena.take(tag, ticket.prompt_blocks - ticket.cached_blocks)
                if taken is None:
                    return
                self._queue.pop(0)
                self._register(ticket, request_id, taken)

    def _register(self, ticket: Ticket, request_id: str, taken: list[int]) -> None:
        self._receives[request_id] = _Receive(ticket, taken)
        registration = Registration(
            **self._about(ticket),
            blocks=blocks.to_runs([[block + NUM_BLOCKS * ticket.junk for block in taken]]),
            prompt_tokens=ticket.prompt_blocks * TOKENS_PER_BLOCK,
            cached_tokens=ticket.cached_blocks * TOKENS_PER_BLOCK,
        )
        self._tell_ranks(Expect(request_id, registration.attempt))
        self._sink.register(registration, ticket.hint)
        if ticket.abort_after_s is not None:
            self._later(ticket.abort_after_s, lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        receive = self._receives.get(request_id)
        if receive is not None:
            receive.aborted = True
            self._sink.aborted(request_id)

    def _finish(self, request_id: str, receive: _Receive) -> None:
        del self._receives[request_id]
        ticket = receive.ticket
        if receive.ok:
            self._sink.received(request_id)
        if receive.aborted or not receive.ok:
            self.arena.give_back(receive.taken)
            if receive.aborted:
                self._sink.first_token(request_id)
                self._end(ticket, "aborted")
            else:
                self._orphan(request_id, ticket, receive.rebound)
            return
        self.scene.stage.counts["pushed blocks"] += len(receive.taken)
        takes_s = self.scene.stage.chance.uniform(0.05, 0.5) * self.scene.pace.work
        self._later(takes_s / 3, lambda: self._sink.first_token(request_id))
        self._run(ticket, takes_s, "pushed", receive.taken)

    def _orphan(self, request_id: str, ticket: Ticket, rebound: tuple[int, str] | None) -> None:
        """vLLM asks again; for a while the router may name another prefill engine."""
        self._orphans[request_id] = ticket

        def give_up() -> None:
            if self._orphans.pop(request_id, None) is not None:
                self._compute(ticket, "recomputed")

        if rebound is not None:
            self.rebind(ticket, *rebound)
        elif ticket.takeover_s:
            self._later(ticket.takeover_s, give_up)
        else:
            give_up()

    def _compute(self, ticket: Ticket, how: str) -> None:
        self._run(ticket, ticket.prompt_blocks * 0.03 * self.scene.pace.work, how, [])

    def _run(self, ticket: Ticket, takes_s: float, how: str, taken: list[int]) -> None:
        self._running[ticket.transfer_id] = ticket

        def done() -> None:
            del self._running[ticket.transfer_id]
            self.arena.give_back(taken)
            self._end(ticket, how)

        self._later(takes_s, done)

    def _decline(self, ticket: Ticket, reason: str) -> None:
        """Nobody will take this transfer: the prefill engine may free its blocks."""
        self._sink.unwanted(Cancel(**self._about(ticket), reason=reason[:256]), ticket.hint)

    def _end(self, ticket: Ticket, how: str) -> None:
        if ticket.ended:
            raise Violation(f"{ticket.transfer_id} ended twice: {ticket.ended}, then {how}")
        ticket.ended, ticket.ended_at = how, self.scene.stage.now
        ticket.watcher(how)

    def _about(self, ticket: Ticket) -> dict[str, Any]:
        return {
            "transfer_id": ticket.transfer_id,
            "attempt": ticket.attempt,
            "sink_engine": self.own.engine,
            "sink_incarnation": self.own.incarnation,
            "request_id": f"d-{ticket.transfer_id}",
        }
