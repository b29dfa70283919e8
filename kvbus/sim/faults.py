"""Which faults a run injects and how often, and the error for a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Faults:
    """How often faults happen: a probability for each message, request or WRITE, or mean seconds between events.

    0 means never.

    Attributes:
        outage_every_s: the NATS server is killed and started again.
        freeze_every_s: the NATS server hangs for a while.
        stall_every_s: nothing reaches one engine for a while, then everything does: a slow consumer.
        forge_every_s: a forger publishes a changed copy of a message. It needs a bus on which engines have keys.
        stuck: a WRITE never ends by itself.
        bad_blocks: a decode engine registers blocks that it does not have.
        rebind: the router moves a request to another prefill engine, or repeats it, though the first engine is alive.
        short_tail: no fault: a decode engine computes a prompt itself, since its cache has nearly all of it.
        history: no fault: the router says that the decode engine may have the prompt's beginning. Then the prefill
            engine takes what it lacks of it: a transfer with the roles turned round.
        mixed_up: both engines have different prompts under one transfer id.
        clock_drift: how far an engine's clock may run fast or slow, as a share.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    partition_every_s: float = 0.0
    kill_every_s: float = 0.0
    outage_every_s: float = 0.0
    freeze_every_s: float = 0.0
    stall_every_s: float = 0.0
    forge_every_s: float = 0.0
    abort: float = 0.0
    write_failure: float = 0.0
    stuck: float = 0.0
    bad_blocks: float = 0.0
    rebind: float = 0.0
    short_tail: float = 0.0
    history: float = 0.3
    mixed_up: float = 0.0
    clock_drift: float = 0.0
    mean_write_s: float = 0.05


NO_FAULTS = Faults()
ALL_FAULTS = Faults(
    drop=0.02,
    duplicate=0.05,
    delay=0.03,
    partition_every_s=20.0,
    kill_every_s=40.0,
    outage_every_s=90.0,
    freeze_every_s=90.0,
    stall_every_s=30.0,
    abort=0.08,
    write_failure=0.02,
    stuck=0.01,
    bad_blocks=0.01,
    rebind=0.05,
    short_tail=0.02,
    mixed_up=0.01,
    clock_drift=0.005,
    mean_write_s=0.2,
)
FAULT_KINDS = {
    "all": ALL_FAULTS,
    "none": NO_FAULTS,
    "bus": Faults(drop=0.05, duplicate=0.1, delay=0.05, outage_every_s=30.0, freeze_every_s=30.0, stall_every_s=15.0),
    "partition": Faults(partition_every_s=5.0, mean_write_s=0.5),
    "kill": Faults(kill_every_s=10.0, mean_write_s=1.5),
    "restart": Faults(kill_every_s=4.0, short_tail=0.1, delay=0.3, duplicate=0.3, mean_write_s=0.5),
    "rebind": Faults(rebind=0.5, short_tail=0.1, delay=0.1, duplicate=0.3, write_failure=0.2),
    "abort": Faults(abort=0.4, short_tail=0.1, mean_write_s=0.5),
    "forge": Faults(forge_every_s=0.0005, delay=0.05, duplicate=0.05, abort=0.1, rebind=0.1, mean_write_s=0.1),
}


class Violation(AssertionError):  # noqa: N818 - the field's word
    """An invariant was broken."""


def faults_of(kind: str) -> Faults:
    if kind not in FAULT_KINDS:
        raise ConfigError("--faults", kind, ", ".join(FAULT_KINDS))
    return FAULT_KINDS[kind]
