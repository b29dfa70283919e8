"""What every simulated engine is made of: real ranks and a real registrar around a fake vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvbus.engine import Rank, Transport
from kvbus.protocol import SinkLease, term_s
from kvbus.protocol.decode import Registrar
from kvbus.protocol.prefill import Matcher
from kvbus.sim.fake_decode import FakeDecode
from kvbus.sim.fake_prefill import FakePrefill
from kvbus.sim.world import World
from kvbus.trace import NoMarks
from kvbus.wire import Heartbeat, Message


class Engine(ABC):
    """One incarnation of an engine. Its clock is offset from those of others, and drifts."""

    vllm: FakePrefill | FakeDecode
    ranks: list[Rank]

    def __init__(self, world: World, own: Heartbeat) -> None:
        self.world, self.own = world, own
        runtime, timing = world.runtime, world.timing
        self._clock_rate = 1 + runtime.rng.uniform(-1, 1) * runtime.faults.clock_drift
        self.registrar = Registrar(
            lease=SinkLease(timing.write_lease_s, timing.max_write_s),
            patience_s=timing.patience_s,
            transfer_timeout_s=timing.max_request_s / 2,
            cancel_timeout_s=timing.cancel_timeout_s,
        )

    @property
    def alive(self) -> bool:
        return self.vllm.alive

    @abstractmethod
    def kill(self) -> None:
        """As SIGKILL: it says no goodbye, and what was posted still lands."""

    def leftovers(self) -> dict[str, int]:
        """How many requests it remembers, by table."""
        return {
            **self.vllm.leftovers(),
            "registrations": len(self.registrar),
            "transfers of ranks": sum(rank.transfers for rank in self.ranks),
            "receives of ranks": sum(rank.receiving for rank in self.ranks),
            "WRITEs": sum(rank.writing for rank in self.ranks),
        }

    def make_clock(self) -> Callable[[], float]:
        runtime, rate = self.world.runtime, self._clock_rate
        offset = runtime.rng.uniform(0, 1e6)
        return lambda: offset + runtime.now * rate

    def make_rank(
        self,
        number: int,
        *,
        clock: Callable[[], float],
        transport: Transport,
        publish: Callable[[str, Message], None],
        introduce: Callable[[str], None],
    ) -> Rank:
        timing, own = self.world.timing, self.own
        return Rank(
            matcher=Matcher(
                engine=own.engine,
                incarnation=own.incarnation,
                rank=number,
                ranks=own.tp_size,
                block_lease_s=timing.block_lease_s,
                pool_hold_s=timing.pool_hold_s,
                registration_hold_s=timing.registration_hold_s,
                write_lease_s=timing.write_lease_s,
            ),
            transport=transport,
            rank=number,
            ranks=own.tp_size,
            publish=publish,
            introduce=introduce,
            clock=clock,
            counters=self.world.counters,
            marking=NoMarks(),
            pulse_interval_s=timing.heartbeat_s if own.writes else None,
            calm_pulse_interval_s=max(timing.heartbeat_s, timing.write_lease_s - timing.heartbeat_s),
            first_pulse_at=clock() + (term_s(timing.write_lease_s, timing.max_write_s) if own.incarnation > 1 else 0.0),
            max_write_s=timing.max_write_s,
        )
