"""How long everything takes in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_NOT_WAITS = ("work", "lead_s", "settle_s")


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one run, seconds. Those that are not explained go to kvbus under the same name.

    Attributes:
        wait: factor of all waiting: leases, heartbeats, patience, how long faults last.
        work: factor of all computing, and of the time between requests and between faults.
        lead_s: from the start to the first request.
        settle_s: how long the cluster may take, without faults, to finish and forget every request.
        offer_wait_s: how long a prefill engine waits for the offer of a history.
        max_history_s: no history may be waited for longer, whatever happens.
        max_request_s: no request may take longer, whatever happens.
    """

    wait: float = 1.0
    work: float = 1.0
    lead_s: float = 3.0
    settle_s: float = 200.0
    heartbeat_s: float = 0.5
    dead_after_s: float = 3.0
    block_lease_s: float = 10.0
    pool_hold_s: float = 3.0
    registration_hold_s: float = 30.0
    patience_s: float = 8.0
    cancel_timeout_s: float = 1.0
    write_lease_s: float = 1.5
    max_write_s: float = 2.0
    offer_wait_s: float = 0.05
    max_history_s: float = 20.0
    max_request_s: float = 60.0

    def with_waits(self, factor: float) -> Timing:
        """The same with every wait ``factor`` times as long."""
        waits = [field.name for field in fields(self) if field.name not in _NOT_WAITS]
        return replace(self, **{name: factor * getattr(self, name) for name in waits})


VIRTUAL = Timing()
# Some waits cannot be configured: sending again, asking for metadata, noticing a dead server. They take a second or two
# in real time, too, so waiting is not shortened as much as computing.
REAL_TIME = replace(VIRTUAL.with_waits(0.4), work=0.2, lead_s=0.5, settle_s=60.0)
