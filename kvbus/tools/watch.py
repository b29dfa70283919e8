"""The tools' loops over a bus: what is heard goes into a pure table, what that makes of it goes to the caller."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kvbus.bus import QUIET_S, Bus, NobodyError, nobody_in
from kvbus.tools.lines import Decoded, Selection, Undecodable
from kvbus.tools.listen import listening
from kvbus.tools.pending import PendingRow, PendingTable
from kvbus.tools.traffic import Snapshot, Traffic
from kvbus.wire import Subjects

PROGRESS_EVERY_S = 0.1


async def tap(
    bus: Bus,
    subjects: Subjects,
    selection: Selection,
    *,
    where: str,
    limit: int | None,
    show: Callable[[float, str, Decoded], None],
    say: Callable[[str], None],
) -> None:
    """Call ``show(wall_s, subject, said)`` for each message that is selected, for ever or ``limit`` times.

    Where nobody speaks at all it says so, once, and goes on.
    """
    async with listening(bus, subjects, [subjects.everything], where=where) as listener:
        say(f"listening to namespace {subjects.namespace} at {where}; Ctrl-C ends it")
        wall_s, shown, missed = time.time() - time.monotonic(), 0, 0
        quiet_s: float | None = QUIET_S
        while True:
            taken = await listener.take(quiet_s)
            if quiet_s is not None and not taken and (nobody := await nobody_in(bus, subjects.namespace, where)):
                say(nobody)
            quiet_s = None
            for heard in taken:
                said = heard.read()
                if not selection.wants(said):
                    continue
                show(wall_s + heard.at, heard.subject, said)
                shown += 1
                if shown == limit:
                    return
            if listener.missed > missed:
                say(f"{listener.missed - missed} messages came too fast to be shown")
                missed = listener.missed


async def top(
    bus: Bus,
    subjects: Subjects,
    *,
    where: str,
    interval_s: float,
    once: bool,
    show: Callable[[Snapshot, bool, str], None],
) -> None:
    """Call ``show(snapshot, connected, nobody)`` every ``interval_s``, for ever or once.

    ``nobody`` says that no engine is in the namespace, and where there are some.

    Raises:
        NobodyError: so it was after the once.
    """
    patterns = [
        subjects.heartbeats("*", "*"),
        subjects.loads("*", "*"),
        subjects.bye("*"),
        subjects.transfers("*"),
        subjects.prefill("*"),
    ]
    async with listening(bus, subjects, patterns, where=where, asks="kvbus-top") as listener:
        traffic, nobody, quiet_until = Traffic(time.monotonic()), "", time.monotonic() + (0 if once else QUIET_S)
        due = time.monotonic() + interval_s
        while True:
            for heard in await listener.take(max(0.0, due - time.monotonic())):
                said = heard.read()
                if isinstance(said, Undecodable):
                    traffic.undecodable += 1
                else:
                    traffic.hear(said, heard.at)
            if (now := time.monotonic()) < due:
                continue
            if not listener.connected:
                traffic.excuse_silence(now)
            snapshot = traffic.snapshot(now)
            if snapshot.engines:
                nobody = ""
            elif listener.connected and now > quiet_until:
                nobody, quiet_until = await nobody_in(bus, subjects.namespace, where), math.inf
            show(snapshot, listener.connected, nobody)
            if once and nobody:
                raise NobodyError(nobody)
            if once:
                return
            due = now + interval_s


async def pending(
    bus: Bus, subjects: Subjects, *, where: str, listen_s: float, progress: Callable[[float], None]
) -> tuple[tuple[PendingRow, ...], int, str]:
    """Listen for ``listen_s``; what is pending then, how many messages there was no room for, and whether nobody spoke.

    ``progress`` gets the seconds listened so far.
    """
    table = PendingTable()
    # One subscription to everything: only within one the order of what an engine says is kept.
    async with listening(bus, subjects, [subjects.everything], where=where) as listener:
        started, spoken = time.monotonic(), False
        while (passed := time.monotonic() - started) < listen_s:
            progress(passed)
            for heard in await listener.take(min(PROGRESS_EVERY_S, listen_s - passed)):
                spoken = True
                if not isinstance(said := heard.read(), Undecodable):
                    table.hear(said, heard.at)
        nobody = "" if spoken else await nobody_in(bus, subjects.namespace, where)
        return table.pending(time.monotonic()), table.unkept + listener.missed, nobody
