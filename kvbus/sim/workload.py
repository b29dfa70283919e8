"""The requests of one run, and the router that sends them to engines and replaces engines that are lost."""

from __future__ import annotations

import random

from kvbus.sim.cluster import Cluster
from kvbus.sim.request import Request
from kvbus.sim.world import World

REQUEST_EVERY_S = 0.3


class Workload:
    """Draws every request in advance.

    Args:
        rng: for the requests. What happens in a run must not change it, so the router draws from one of its own.
    """

    def __init__(
        self, world: World, cluster: Cluster, count: int, rng: random.Random, router_rng: random.Random
    ) -> None:
        self._runtime, self._timing, self._cluster = world.runtime, world.timing, cluster
        self._count, self._rng, self._router_rng = count, rng, router_rng
        self.duration_s = count * REQUEST_EVERY_S * world.timing.work
        self.requests: list[Request] = []
        self.ended = 0

    @property
    def done(self) -> bool:
        return self.ended == self._count

    def schedule(self) -> None:
        """Let every request arrive at its time from now on."""
        for number in range(self._count):
            self._schedule_request(number)

    def on_engine_killed(self, name: str) -> None:
        """Replace a prefill engine for the requests that it has not finished."""
        for request in self.requests:
            if request.source == name and not request.prefilled and not request.ended and request.takeover_s:
                self._replace_prefill(request)

    def _schedule_request(self, number: int) -> None:
        rng, router_rng, timing, faults = self._rng, self._router_rng, self._timing, self._runtime.faults
        prefill, decode = rng.choice(self._cluster.prefills), rng.choice(self._cluster.decodes)
        blocks = rng.randint(1, 12)
        aborts, fails = (rng.random() < faults.abort / part for part in (1, 2))
        request = Request(
            transfer_id=f"t{number}",
            prompt_blocks=blocks,
            cached_blocks=rng.choice((0, 0, blocks // 2)),
            abort_after_s=rng.expovariate(1.0) * timing.wait if aborts else None,
            takeover_s=router_rng.choice((0.0, 2.0)) * timing.wait,
            prefill_fails=fails,
            bad_blocks=router_rng.random() < faults.bad_blocks,
            short_tail=router_rng.random() < faults.short_tail,
            mixed_up=router_rng.random() < faults.mixed_up,
        )
        if router_rng.random() < faults.history:
            request.history = True
            request.cached_blocks = router_rng.randrange(blocks)
            request.source_cached_blocks = router_rng.choice((0, 0, 0, request.cached_blocks // 2, blocks))
        request.on_event = lambda event: self._count_event(request, event)
        request.on_decode_lost = lambda: self._replace_decode(request)
        self.requests.append(request)
        hinted, sequential = rng.random() < 0.7, rng.random() < 0.2
        prefill_after_s = rng.expovariate(100.0)
        decode_after_s = rng.uniform(0.5, 2.0) * timing.wait if sequential else rng.expovariate(100.0)
        self._runtime.call_later(
            timing.lead_s + rng.random() * self.duration_s,
            lambda: self._arrive(request, prefill, decode, hinted, prefill_after_s, decode_after_s),
        )

    def _arrive(
        self, request: Request, prefill: str, decode: str, hinted: bool, prefill_after_s: float, decode_after_s: float
    ) -> None:
        """Send both legs of a request, as a rule at about the same time."""
        runtime, cluster = self._runtime, self._cluster
        source, sink = cluster.route(prefill, cluster.prefills), cluster.route(decode, cluster.decodes)
        request.started, request.source, request.sink = runtime.now, source, sink
        request.hint = source if hinted else ""
        runtime.call_later(prefill_after_s, lambda: cluster.engines[source].vllm.take(request))
        runtime.call_later(decode_after_s, lambda: cluster.engines[sink].vllm.take(request))
        if self._router_rng.random() < runtime.faults.rebind:
            runtime.call_later(self._notice_s(), lambda: self._replace_prefill(request))

    def _count_event(self, request: Request, event: str) -> None:
        self._runtime.counts[event] += 1
        request.prefilled = request.prefilled or event == "prefilled"
        self.ended += event != "prefilled"

    def _replace_decode(self, request: Request) -> bool:
        """The decode engine died before the first token: another one asks for the same KV, under the next attempt."""
        if not request.takeover_s:
            return False
        request.attempt, request.hint, request.history = request.attempt + 1, request.source, False
        self._runtime.counts["decode engines replaced"] += 1

        def send() -> None:
            request.sink = self._cluster.route(request.sink, self._cluster.decodes)
            self._cluster.engines[request.sink].vllm.take(request)

        self._runtime.call_later(self._notice_s(), send)
        return True

    def _replace_prefill(self, request: Request) -> None:
        """Another prefill engine computes it, or the same one still has it; the decode engine is told."""
        self._runtime.counts["prefill engines replaced"] += 1
        attempt, cluster = request.attempt + 1, self._cluster

        def send() -> None:
            if request.ended or attempt <= request.attempt:
                return
            source = cluster.route(self._router_rng.choice(cluster.prefills), cluster.prefills)
            request.history = False  # its legs say nothing of it
            if source != request.source or not cluster.engines[source].alive:
                cluster.engines[source].vllm.take(request)
            request.source = source
            cluster.decode(request.sink).rebind(request, attempt, source)

        self._runtime.call_later(self._notice_s(), send)

    def _notice_s(self) -> float:
        """How long the router takes to notice."""
        return self._router_rng.expovariate(2.0) * self._timing.wait
