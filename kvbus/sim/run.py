"""Many lives, one after the other: ``kvbus sim``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from kvbus.errors import ConfigError, KVBusError
from kvbus.sim.life import TRANSFERS_PER_LIFE, Account, Life
from kvbus.sim.world import ALL_FAULTS, CALM, Faults, Violation

KINDS = {
    "all": ALL_FAULTS,
    "none": CALM,
    "bus": replace(CALM, drop=0.05, double=0.1, late=0.05, outage_every_s=30.0, stall_every_s=15.0),
    "partition": replace(CALM, cut_every_s=5.0, mean_write_s=0.5),
    "kill": replace(CALM, kill_every_s=10.0, mean_write_s=0.5),
    "abort": replace(CALM, abort=0.4, mean_write_s=0.5),
}


class LawBrokenError(KVBusError):
    """A life broke a law; the same seed breaks it again."""

    def __init__(self, seed: int, kind: str, law: str) -> None:
        self.seed, self.kind, self.law = seed, kind, law
        again = f"kvbus sim --seed {seed} --faults {kind} --transfers {TRANSFERS_PER_LIFE}"
        super().__init__(f"kvbus: seed {seed}: {law}; see it again with: {again}")


def faults_of(kind: str) -> Faults:
    if kind not in KINDS:
        raise ConfigError("--faults", kind, ", ".join(KINDS))
    return KINDS[kind]


def run_lives(seed: int, transfers: int, kind: str, progress: Callable[[int], None]) -> Account:
    """Run lives of consecutive seeds until so many transfers have been seen; ``progress`` is told after each.

    Raises:
        LawBrokenError: naming the seed that shows it again.
    """
    faults = faults_of(kind)
    account = Account(0, Counter(), 0.0)
    while account.transfers < transfers:
        count = min(TRANSFERS_PER_LIFE, transfers - account.transfers)
        try:
            account += Life(seed, faults, count).live()
        except Violation as violation:
            raise LawBrokenError(seed, kind, str(violation)) from violation
        seed += 1
        progress(account.transfers)
    return account
