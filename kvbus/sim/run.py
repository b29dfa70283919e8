"""Several runs, one after the other: ``kvbus sim``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvbus.errors import ConfigError, KVBusError
from kvbus.sim.faults import Faults, Violation, faults_of
from kvbus.sim.realtime import run_real_time
from kvbus.sim.scenario import Summary
from kvbus.sim.virtual import run_virtual

BUSES = ("virtual", "memory", "nats")
TRANSFERS_PER_RUN = 200


class InvariantBrokenError(KVBusError):
    """A run broke an invariant. In virtual time the same seed breaks it again; in real time it may."""

    def __init__(self, seed: int, kind: str, bus: str, violation: Violation) -> None:
        self.seed, self.kind, self.bus, self.violation = seed, kind, bus, violation
        again = f"--seed {seed} --faults {kind} --transfers {TRANSFERS_PER_RUN}"
        if bus == "virtual":
            hint, command = "see it again with", "kvbus sim"
        else:
            hint = "the seed gives requests and faults, the machine when each thing happens, so try more than once"
            command = f"kvbus sim --bus {bus}"
        super().__init__(f"kvbus: seed {seed}: {violation}; {hint}: {command} {again}")


def run_many(seed: int, transfers: int, kind: str, progress: Callable[[int], None], bus: str = "virtual") -> Summary:
    """Run consecutive seeds until so many transfers have ended; ``progress`` is called with their number now and then.

    Raises:
        InvariantBrokenError: naming the seed.
    """
    faults = faults_of(kind)
    if bus not in BUSES:
        raise ConfigError("--bus", bus, ", ".join(BUSES))
    if bus == "virtual" and faults.forge_every_s:
        raise ConfigError("--faults", kind, "with --bus memory or --bus nats, where engines have keys")
    summary = Summary(0, Counter(), 0.0)
    while summary.transfers < transfers:
        count = min(TRANSFERS_PER_RUN, transfers - summary.transfers)
        before = summary.transfers
        try:
            summary += _run(seed, faults, bus, count, lambda ended, before=before: progress(before + ended))  # type: ignore[misc]
        except Violation as violation:
            raise InvariantBrokenError(seed, kind, bus, violation) from violation
        seed += 1
        progress(summary.transfers)
    return summary


def _run(seed: int, faults: Faults, bus: str, transfers: int, progress: Callable[[int], None]) -> Summary:
    if bus == "virtual":
        return run_virtual(seed, faults, transfers)
    return run_real_time(seed, faults, bus, transfers, progress)
