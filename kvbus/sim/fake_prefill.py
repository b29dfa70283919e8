"""A fake vLLM of a prefill engine: requests queue, take time to compute, and hold blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvbus.engine import Item, RankReport, Told
from kvbus.sim.fake_vllm import TOKENS_PER_BLOCK, FakeVllm
from kvbus.sim.faults import Violation
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus.wire import Heartbeat, PrefillCompleted, PrefillFailed, PrefillProgress, blocks

PrefillMessage = PrefillProgress | PrefillCompleted | PrefillFailed


class FakePrefill(FakeVllm):
    """Computes one prompt at a time.

    Args:
        publish: says on the bus how a prefill is going.
    """

    def __init__(
        self,
        world: World,
        own: Heartbeat,
        submit: Callable[[int, Item], None],
        publish: Callable[[PrefillMessage], None],
    ) -> None:
        super().__init__(world, own, submit)
        self._publish = publish
        self._queue: list[Request] = []
        self._computing: Request | None = None
        self._held: dict[str, list[int]] = {}
        self._number = 0
        self._released: Counter[str] = Counter()

    def leftovers(self) -> dict[str, int]:
        return {"queued": len(self._queue) + (self._computing is not None), "held": len(self._held)}

    def take(self, request: Request) -> None:
        if not self.alive:
            return
        self._queue.append(request)
        total = request.prompt_blocks * TOKENS_PER_BLOCK
        self._tell(PrefillProgress(**self._ids_of(request), computed=0, total=total, number=self._next_number()))
        self.step()

    def on_report(self, rank: int, report: RankReport) -> None:
        """Free the blocks that no rank reads any more."""
        for request_id in report.released:
            if request_id not in self._held:
                raise Violation(f"{self.own.engine} released {request_id:.64}, which it does not hold: vLLM dies of it")
            self._released[request_id] += 1
            if self._released[request_id] == self.own.tp_size:
                self.pool.free(self._held.pop(request_id))
        self.step()

    def step(self) -> None:
        if self._computing is not None or not self._queue or not self.alive:
            return
        request = self._queue[0]
        taken = self.pool.allocate(self._ids_of(request)["request_id"], request.prompt_blocks)
        if taken is None:
            return
        self._computing = self._queue.pop(0)
        takes_s = request.prompt_blocks * self.world.runtime.rng.uniform(0.01, 0.04) * self.world.timing.work
        self._call_later(takes_s, lambda: self._finish(request, taken))

    def _finish(self, request: Request, taken: list[int]) -> None:
        self._computing = None
        ids = {**self._ids_of(request), "number": self._next_number()}
        if request.prefill_fails:
            self.pool.free(taken)
            self._tell(PrefillFailed(**ids, reason="aborted"))
        else:
            self._held[ids["request_id"]] = taken
            tokens = request.prompt_blocks * TOKENS_PER_BLOCK
            self._tell(PrefillCompleted(**ids, blocks=blocks.to_runs([taken]), tokens=tokens))
        request.on_event("prefilled")
        self.step()

    def _tell(self, message: PrefillMessage) -> None:
        self._publish(message)
        self._tell_ranks(message)  # this way it cannot be lost
        self._tell_ranks(Told(message.number))

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _ids_of(self, request: Request) -> dict[str, Any]:
        return {
            "transfer_id": request.transfer_id,
            "source_engine": self.own.engine,
            "source_incarnation": self.own.incarnation,
            "request_id": f"p-{request.transfer_id}",
        }
