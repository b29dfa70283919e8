"""Many lives, one after the other: ``kvbus sim``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvbus.errors import ConfigError, KVBusError
from kvbus.sim.faults import Faults, Violation, faults_of
from kvbus.sim.life import TRANSFERS_PER_LIFE, Account, Life
from kvbus.sim.live import live_once

BUSES = ("virtual", "memory", "nats")


class LawBrokenError(KVBusError):
    """A life broke a law. In virtual time the same seed breaks it again; in real time it may."""

    def __init__(self, seed: int, kind: str, bus: str, law: str) -> None:
        self.seed, self.kind, self.bus, self.law = seed, kind, bus, law
        again = f"--seed {seed} --faults {kind} --transfers {TRANSFERS_PER_LIFE}"
        if bus == "virtual":
            hint, command = "see it again with", "kvbus sim"
        else:
            hint = "the seed gives requests and faults, the machine when each thing happens, so try more than once"
            command = f"kvbus sim --bus {bus}"
        super().__init__(f"kvbus: seed {seed}: {law}; {hint}: {command} {again}")


def run_lives(seed: int, transfers: int, kind: str, progress: Callable[[int], None], bus: str = "virtual") -> Account:
    """Run lives of consecutive seeds until so many transfers have been seen; ``progress`` is told now and then.

    Raises:
        LawBrokenError: naming the seed.
    """
    faults = faults_of(kind)
    if bus not in BUSES:
        raise ConfigError("--bus", bus, ", ".join(BUSES))
    if bus == "virtual" and faults.forge_every_s:
        raise ConfigError("--faults", kind, "with --bus memory or --bus nats, where engines have keys")
    account = Account(0, Counter(), 0.0)
    while account.transfers < transfers:
        count = min(TRANSFERS_PER_LIFE, transfers - account.transfers)
        before = account.transfers
        try:
            account += _live(seed, faults, bus, count, lambda ended, before=before: progress(before + ended))  # type: ignore[misc]
        except Violation as violation:
            raise LawBrokenError(seed, kind, bus, str(violation)) from violation
        seed += 1
        progress(account.transfers)
    return account


def _live(seed: int, faults: Faults, bus: str, transfers: int, progress: Callable[[int], None]) -> Account:
    if bus == "virtual":
        return Life(seed, faults, transfers).live()
    return live_once(seed, faults, bus, transfers, progress)
