"""A fake vLLM of a prefill engine: requests queue, take time to compute, and hold blocks."""

from __future__ import annotations

from collections.abc import Callable

from kvbus.engine import Expect, Item, OfPrefill, RankReport
from kvbus.sim.fabric import owner_of_attempt
from kvbus.sim.fake_history import Taker
from kvbus.sim.fake_vllm import TOKENS_PER_BLOCK, FakeVllm, Receive, SinkPort
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus.wire import FIRST_ATTEMPT, Heartbeat, PrefillCompleted, PrefillFailed, PrefillProgress, blocks


class FakePrefill(FakeVllm):
    """Computes one prompt at a time. Meanwhile the history of others may come."""

    def __init__(
        self,
        world: World,
        own: Heartbeat,
        submit: Callable[[int, Item], None],
        publish: Callable[[OfPrefill], None],
        sink: SinkPort,
    ) -> None:
        super().__init__(world, own, submit, publish, sink)
        self._taker = Taker(world, own, sink, self._as_sink)
        self._queue: list[Request] = []
        self._computing: Request | None = None
        self._begun: dict[str, tuple[list[int], int]] = {}
        """Of requests whose history has come: their blocks, and how many of them need not be computed."""

    def leftovers(self) -> dict[str, int]:
        return {
            "queued": len(self._queue) + (self._computing is not None),
            "held": len(self._held),
            "histories": len(self._receives) + len(self._taker) + len(self._begun),
        }

    def take(self, request: Request) -> None:
        if not self.alive:
            return
        self._queue.append(request)
        total = request.prompt_blocks * TOKENS_PER_BLOCK
        self._tell(PrefillProgress(**self._as_source(request), computed=0, total=total))
        if self._taker.ask(request):
            self._call_later(self.world.timing.offer_wait_s, self.step)
        self.step()

    def moved(self, message: OfPrefill) -> None:
        if self._taker.hear(message):
            self.step()

    def on_report(self, rank: int, report: RankReport) -> None:
        super().on_report(rank, report)
        self.step()

    def step(self) -> None:
        if not self.alive:
            return
        for request in list(self._queue):
            if not self._taker.waits(request) and (offered := self._taker.offered(request)):
                self._receive(request, offered)
        ready = [request for request in self._queue if not self._taker.waits(request)]
        if self._computing is None and ready:
            self._compute(ready[0])

    def _receive(self, request: Request, offered: int) -> None:
        """Take blocks for the whole prompt, and what is missing of the history."""
        if self.pool.free_blocks < request.prompt_blocks:
            return
        request_id, own = self._id_of(request), request.source_cached_blocks
        missing = self.pool.allocate(owner_of_attempt(request_id, FIRST_ATTEMPT), offered - own) or []
        others = self.pool.allocate(request_id, request.prompt_blocks - len(missing)) or []
        self.pool.fill(others[:own], self.own.tp_size, request.prompt_on(self.own.role))
        self._queue.remove(request)
        self._receives[request_id] = Receive(request, missing, others)
        self._tell_ranks(Expect(request_id, FIRST_ATTEMPT))
        self._taker.register(request, missing, offered, self._digest(request, offered * TOKENS_PER_BLOCK))
        if request.prefill_fails:
            self._call_later(self.world.runtime.rng.uniform(0.0, 0.5), lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        """The prefill leg is closed; its blocks are free when no rank can write into them."""
        receive = self._receives.get(request_id)
        if receive is not None:
            receive.aborted = True
            self._sink.aborted(request_id)

    def _arrived(self, request_id: str, receive: Receive) -> None:
        request, own = receive.request, receive.request.source_cached_blocks
        del self._receives[request_id]
        self._taker.over(request, request_id, ok=receive.ok)
        if receive.ok:
            self._check_content(receive.blocks, request, own)
        if receive.aborted or not receive.ok:
            self.pool.free([*receive.blocks, *receive.others])
        if receive.aborted:
            self._fail(request)
            return
        if receive.ok:
            self.world.runtime.counts["history blocks"] += len(receive.blocks)
            self.pool.hand_over(receive.blocks, request_id)
            taken = [*receive.others[:own], *receive.blocks, *receive.others[own:]]
            self._begun[request_id] = (taken, own + len(receive.blocks))
        self._queue.insert(0, request)

    def _compute(self, request: Request) -> None:
        request_id = self._id_of(request)
        taken, come = self._begun.pop(request_id, (None, 0))
        taken = taken or self.pool.allocate(request_id, request.prompt_blocks)
        if taken is None:
            return
        self._queue.remove(request)
        self._computing, block_ids = request, taken
        takes_s = (request.prompt_blocks - come) * self.world.runtime.rng.uniform(0.01, 0.04) * self.world.timing.work
        self._call_later(takes_s, lambda: self._finish(request, block_ids, come))

    def _finish(self, request: Request, taken: list[int], come: int) -> None:
        self._computing = None
        self.pool.fill(taken[come:], self.own.tp_size, request.prompt_on(self.own.role), come)
        if request.prefill_fails:
            self.pool.free(taken)
            self._fail(request)
        else:
            self._held[self._id_of(request)] = taken
            tokens = request.prompt_blocks * TOKENS_PER_BLOCK
            about, digest = self._as_source(request), self._digest(request, tokens)
            self._tell(PrefillCompleted(**about, blocks=blocks.to_runs([taken]), tokens=tokens, digest=digest))
            request.on_event("prefilled")
        self.step()

    def _fail(self, request: Request) -> None:
        self._tell(PrefillFailed(**self._as_source(request), reason="aborted"))
        request.on_event("prefilled")

    def _let_go(self, request_id: str, block_ids: list[int]) -> None:
        self.pool.free(block_ids)
