"""The simulator in real time over a nats-server that is killed, started again and frozen; and its command."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from support.waiting import eventually_sync

from kvbus.sim.faults import ALL_FAULTS
from kvbus.sim.realtime import run_real_time

ENDS = ("pushed", "recomputed", "computed locally", "aborted", "lost with its decode engine")
MANY_FAULTS = replace(
    ALL_FAULTS, partition_every_s=10.0, kill_every_s=10.0, outage_every_s=12.0, freeze_every_s=12.0, stall_every_s=8.0
)


@pytest.mark.slow
def test_no_invariant_is_broken_by_many_faults() -> None:
    before = psutil.Process().children()
    account = run_real_time(13, MANY_FAULTS, "nats", 120)  # a seed whose schedule has something of everything
    counts = account.counts
    assert sum(counts[end] for end in ENDS) == account.transfers == 120
    assert counts["pushed"] > 40
    happened = ("kills", "restarts", "partitions", "outages", "freezes", "stalls")
    happened += ("messages dropped", "messages doubled", "messages late", "messages held up")
    assert all(counts[each] for each in happened), counts
    assert psutil.Process().children() == before, "the server has ended"


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_its_server() -> None:
    command = [sys.executable, "-m", "kvbus", "sim", "--bus", "nats"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        family = psutil.Process(started.pid)
        eventually_sync(lambda: any(_is_used(child) for child in family.children()), 30.0)
        children = family.children()
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=15.0)
    finally:
        started.kill()
    assert started.returncode == 130
    assert "stopped" in said
    assert "Traceback" not in said
    assert children
    assert not any(each.is_running() for each in children)


def _is_used(child: psutil.Process) -> bool:
    """Whether it is a nats-server with which engines have connected."""
    return child.name() == "nats-server" and len(child.net_connections()) > 3
