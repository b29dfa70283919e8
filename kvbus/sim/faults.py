"""What goes wrong in a life, how often, and the word for a law that was broken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Faults:
    """How often things go wrong: chances for each message or WRITE, and mean seconds between events; 0 is never.

    Attributes:
        outage_every_s: the NATS server is killed, and started again.
        freeze_every_s: the NATS server stands still for a while.
        stall_every_s: nothing reaches an engine for a while, then everything does: a slow consumer.
        stuck: a WRITE never ends by itself.
        junk: a decode engine registers blocks that it does not have.
        forge_every_s: somebody says what it has changed of something heard; needs a bus on which engines have keys.
        rebind: the router gives a request to another prefill engine, or anew to the same, though the first one lives.
    """

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    cut_every_s: float = 0.0
    kill_every_s: float = 0.0
    outage_every_s: float = 0.0
    freeze_every_s: float = 0.0
    stall_every_s: float = 0.0
    forge_every_s: float = 0.0
    abort: float = 0.0
    write_failure: float = 0.0
    stuck: float = 0.0
    junk: float = 0.0
    rebind: float = 0.0
    drift: float = 0.0
    mean_write_s: float = 0.05


CALM = Faults()
ALL_FAULTS = Faults(
    drop=0.02,
    double=0.05,
    late=0.03,
    cut_every_s=20.0,
    kill_every_s=40.0,
    outage_every_s=90.0,
    freeze_every_s=90.0,
    stall_every_s=30.0,
    abort=0.08,
    write_failure=0.02,
    stuck=0.01,
    junk=0.01,
    rebind=0.05,
    drift=0.005,
    mean_write_s=0.2,
)
KINDS = {
    "all": ALL_FAULTS,
    "none": CALM,
    "bus": replace(
        CALM, drop=0.05, double=0.1, late=0.05, outage_every_s=30.0, freeze_every_s=30.0, stall_every_s=15.0
    ),
    "partition": replace(CALM, cut_every_s=5.0, mean_write_s=0.5),
    "kill": replace(CALM, kill_every_s=10.0, mean_write_s=1.5),
    "restart": replace(CALM, kill_every_s=4.0, late=0.3, double=0.3, mean_write_s=0.5),
    "rebind": replace(CALM, rebind=0.5, late=0.1, double=0.3, write_failure=0.2),
    "abort": replace(CALM, abort=0.4, mean_write_s=0.5),
    "forge": replace(CALM, forge_every_s=0.0005, late=0.05, double=0.05, abort=0.1, rebind=0.1, mean_write_s=0.1),
}


class Violation(AssertionError):  # noqa: N818 - the field's word
    """A law was broken."""


def faults_of(kind: str) -> Faults:
    if kind not in KINDS:
        raise ConfigError("--faults", kind, ", ".join(KINDS))
    return KINDS[kind]
