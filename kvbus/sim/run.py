"""Many lives, one after the other: ``kvbus sim``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvbus.errors import KVBusError
from kvbus.sim.faults import Violation, faults_of
from kvbus.sim.life import TRANSFERS_PER_LIFE, Account, Life


class LawBrokenError(KVBusError):
    """A life broke a law; the same seed breaks it again."""

    def __init__(self, seed: int, kind: str, law: str) -> None:
        self.seed, self.kind, self.law = seed, kind, law
        again = f"kvbus sim --seed {seed} --faults {kind} --transfers {TRANSFERS_PER_LIFE}"
        super().__init__(f"kvbus: seed {seed}: {law}; see it again with: {again}")


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
