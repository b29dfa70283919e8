"""A fake vLLM of a decode engine: requests queue, wait for their KV, abort, run, and end."""

from __future__ import annotations

from collections.abc import Callable

from kvbus.engine import Expect, Item, OfPrefill
from kvbus.sim.fabric import NUM_BLOCKS, owner_of_attempt
from kvbus.sim.fake_history import Giver
from kvbus.sim.fake_vllm import TOKENS_PER_BLOCK, FakeVllm, Receive, SinkPort
from kvbus.sim.faults import Violation
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus.wire import Cancel, Heartbeat, Registration, Wanted, blocks


class FakeDecode(FakeVllm):
    """See the module's docstring.

    A request that lost its KV is an orphan until the router names another prefill engine, or takes too long to.
    """

    def __init__(
        self,
        world: World,
        own: Heartbeat,
        submit: Callable[[int, Item], None],
        publish: Callable[[OfPrefill], None],
        sink: SinkPort,
    ) -> None:
        super().__init__(world, own, submit, publish, sink)
        self._giver = Giver(world, own, self._as_source, self._tell, self._tell_ranks)
        self._queue: list[Request] = []
        self._running: dict[str, Request] = {}
        self._orphans: dict[str, Request] = {}
        self._want_again_at = 0.0

    def leftovers(self) -> dict[str, int]:
        waiting = len(self._queue) + len(self._orphans)
        return {
            "queued": waiting,
            "receives": len(self._receives),
            "running": len(self._running),
            "histories": len(self._held) + len(self._giver),
        }

    def take(self, request: Request) -> None:
        if not self.alive:
            self._end(request, "lost with its decode engine")
            return
        self._queue.append(request)
        self._schedule()

    def kill(self) -> None:
        super().kill()
        receiving = [each.request for each in self._receives.values()]
        for request in [*self._queue, *self._orphans.values(), *receiving, *self._running.values()]:
            if request.ended or not request.on_decode_lost():
                self._end(request, "lost with its decode engine")

    def moved(self, message: OfPrefill) -> None:
        """How far prefills are tells nothing here: blocks are taken at once."""

    def rebind(self, request: Request, attempt: int, engine: str) -> None:
        """The router has given this request's prefill to ``engine``."""
        request_id = self._id_of(request)
        if (receive := self._receives.get(request_id)) is not None and not receive.aborted:
            receive.rebound = (attempt, engine)
            self._sink.rebound(request_id, attempt, engine)
        elif request in self._queue or request_id in self._orphans:
            request.attempt, request.hint = attempt, engine
            if self._orphans.pop(request_id, None) is not None:
                self._queue.insert(0, request)
                self._schedule()

    def step(self) -> None:
        self._schedule()
        if self.world.runtime.now >= self._want_again_at:
            self._want_again_at = self.world.runtime.now + self.world.timing.block_lease_s / 3
            for request in self._queue:
                self._sink.want(Wanted(**self._as_sink(request, request.attempt)), request.hint)
        for request_id, receive in self._receives.items():
            if self._is_over(receive):
                self._giver.withdraw(request_id)  # the prefill engine may be gone

    def _schedule(self) -> None:
        while self._queue and self.alive:
            request = self._queue[0]
            waited_s = self.world.runtime.now - request.started
            if request.abort_after_s is not None and waited_s > request.abort_after_s:
                self._queue.pop(0)
                self._decline(request, "finished before it was scheduled")
                self._end(request, "aborted")
            elif reason := "short tail" if request.short_tail else self._sink.why_not(request.hint):
                self._queue.pop(0)
                self._decline(request, reason)
                self._compute(request, "computed locally")
            else:
                request_id = self._id_of(request)
                missing, offers = request.prompt_blocks - request.cached_blocks, self._giver.is_asked(request)
                if self.pool.free_blocks < missing + offers * request.cached_blocks:
                    return
                self._queue.pop(0)
                taken = self.pool.allocate(owner_of_attempt(request_id, request.attempt), missing) or []
                self._register(request, request_id, taken)
                if offers:
                    self._offer(request, request_id)

    def _register(self, request: Request, request_id: str, taken: list[int]) -> None:
        self._receives[request_id] = Receive(request, taken)
        registration = Registration(
            **self._as_sink(request, request.attempt),
            blocks=blocks.to_runs([[block + NUM_BLOCKS * request.bad_blocks for block in taken]]),
            prompt_tokens=request.prompt_blocks * TOKENS_PER_BLOCK,
            cached_tokens=request.cached_blocks * TOKENS_PER_BLOCK,
            digest=self._digest(request, request.prompt_blocks * TOKENS_PER_BLOCK),
        )
        self._tell_ranks(Expect(request_id, registration.attempt))
        self._sink.register(registration, request.hint)
        if request.abort_after_s is not None:
            self._call_later(request.abort_after_s, lambda: self._abort(request_id))

    def _offer(self, request: Request, request_id: str) -> None:
        """What the cache has of the prompt is the request's own from now on."""
        kept = self.pool.allocate(request_id, request.cached_blocks) or []
        self.pool.fill(kept, self.own.tp_size, request.prompt_on(self.own.role))
        if kept:
            self._held[request_id] = self._receives[request_id].others = kept
        self._giver.offer(request, request_id, kept, self._digest(request, len(kept) * TOKENS_PER_BLOCK))

    def _let_go(self, request_id: str, block_ids: list[int]) -> None:
        self._giver.let_go(request_id)
        receive = self._receives.get(request_id)
        if receive is not None and self._is_over(receive):
            self._arrived(request_id, receive)

    def _abort(self, request_id: str) -> None:
        receive = self._receives.get(request_id)
        if receive is not None:
            receive.aborted = True
            self._sink.aborted(request_id)

    def _arrived(self, request_id: str, receive: Receive) -> None:
        if self._giver.holds_back(request_id):
            self.world.runtime.counts["held back by their history"] += 1
            self._giver.withdraw(request_id)
            return
        del self._receives[request_id]
        request = receive.request
        if receive.ok:
            self._sink.received(request_id)
        if receive.aborted or not receive.ok:
            self.pool.free([*receive.blocks, *receive.others])
            if receive.aborted:
                self._sink.first_token(request_id)
                self._end(request, "aborted")
            else:
                self._orphan(request_id, request, receive.rebound)
            return
        self._check_content(receive.blocks, request, request.cached_blocks)
        self.world.runtime.counts["pushed blocks"] += len(receive.blocks)
        takes_s = self.world.runtime.rng.uniform(0.05, 0.5) * self.world.timing.work
        self._call_later(takes_s / 3, lambda: self._sink.first_token(request_id))
        self._run(request, takes_s, "pushed", [*receive.blocks, *receive.others])

    def _orphan(self, request_id: str, request: Request, rebound: tuple[int, str] | None) -> None:
        """Wait a while for the router to name another prefill engine; then recompute."""
        self._orphans[request_id] = request

        def give_up() -> None:
            if self._orphans.pop(request_id, None) is not None:
                self._compute(request, "recomputed")

        if rebound is not None:
            self.rebind(request, *rebound)
        elif request.takeover_s:
            self._call_later(request.takeover_s, give_up)
        else:
            give_up()

    def _compute(self, request: Request, how: str) -> None:
        self._run(request, request.prompt_blocks * 0.03 * self.world.timing.work, how, [])

    def _run(self, request: Request, takes_s: float, how: str, taken: list[int]) -> None:
        self._running[request.transfer_id] = request

        def done() -> None:
            del self._running[request.transfer_id]
            self.pool.free(taken)
            self._end(request, how)

        self._call_later(takes_s, done)

    def _decline(self, request: Request, reason: str) -> None:
        """Tell the prefill engine that nobody takes this transfer: it may free its blocks."""
        self._sink.unwanted(Cancel(**self._as_sink(request, request.attempt), reason=reason[:256]), request.hint)

    def _end(self, request: Request, how: str) -> None:
        if request.ended:
            raise Violation(f"{request.transfer_id} ended twice: {request.ended}, then {how}")
        request.ended, request.ended_at = how, self.world.runtime.now
        request.on_event(how)
