"""How long everything takes in a simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one run; those that do not say otherwise go to kvbus under the same name.

    Attributes:
        wait: factor of all waiting: leases, heartbeats, patience, how long faults last.
        work: factor of all computing, and of the time between requests and between faults.
        lead_s: from the start to the first request.
        settle_s: how long the cluster may take, without faults, to finish and forget every request.
        max_request_s: no request may take longer, whatever happens.
    """

    wait: float
    work: float
    lead_s: float
    settle_s: float
    heartbeat_s: float
    dead_after_s: float
    block_lease_s: float
    pool_hold_s: float
    registration_hold_s: float
    patience_s: float
    cancel_timeout_s: float
    write_lease_s: float
    max_write_s: float
    max_request_s: float
    request_every_s: float


def make_timing(*, wait: float, work: float, lead_s: float, settle_s: float) -> Timing:
    return Timing(
        wait=wait,
        work=work,
        lead_s=lead_s,
        settle_s=settle_s,
        heartbeat_s=0.5 * wait,
        dead_after_s=3.0 * wait,
        block_lease_s=10.0 * wait,
        pool_hold_s=3.0 * wait,
        registration_hold_s=30.0 * wait,
        patience_s=8.0 * wait,
        cancel_timeout_s=1.0 * wait,
        write_lease_s=1.5 * wait,
        max_write_s=2.0 * wait,
        max_request_s=60.0 * wait,
        request_every_s=0.3 * work,
    )


VIRTUAL = make_timing(wait=1.0, work=1.0, lead_s=3.0, settle_s=200.0)
# Some waits cannot be configured: sending again, asking for metadata, noticing a dead server. They take a second or two
# in real time, too, so waiting is not shortened as much as computing.
REAL_TIME = make_timing(wait=0.4, work=0.2, lead_s=0.5, settle_s=60.0)
