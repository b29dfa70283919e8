"""The write lease: until when a prefill rank may post a WRITE into a decode engine, without synchronised clocks.

A posted WRITE cannot be taken back, so a decode engine that hears nothing must know when nothing can be posted.

1. Each prefill rank gives each of its pulses a number that nobody can guess, and remembers when it sent each, on its
   own monotonic clock.
2. A decode engine that has business with the rank echoes the number it heard last, and remembers when it heard it.
3. The rank may post only while ``now - sent_at(latest number echoed) <= write_lease_s``.
4. The decode engine may give blocks back once ``heard_at(the number it echoed last) + write_lease_s + max_write_s`` has
   passed, though nobody answers: it only has to stop echoing.

5. Blocks that were given back so, without an answer, may still be registered with the rank. So the decode engine begins
   a new *epoch* then, sends its live registrations again, and says the epoch with each registration and echo; a rank
   that hears of a newer epoch forgets what was registered before it, and only then renews its right.
6. A restarted prefill engine sends its first pulse only when what its predecessor posted has ended.

A number that was never sent gives no right, so a pulse that somebody else invents, or says again, only lets the decode
engine wait longer; an echo is sealed by its decode engine (:mod:`kvbus.bus.keys`).

Why that is safe: number ``n`` was heard after it was sent, so the rank's right under ``n``, counted from
``sent_at(n)``, ends before the decode engine's count from ``heard_at(n)``; a WRITE posted at the last moment has ended
``max_write_s`` later; and without an echo of a later number the rank never has a longer right. Only the *rates* of the
two clocks matter: :data:`CLOCK_DRIFT` is added for them. It rests on two parameters, which all engines of a namespace
must share: ``write_lease_s``, and ``max_write_s``, the longest that a posted WRITE can run. The rank enforces the
latter: it disconnects from the peer then, before it drives the transport on. What is left to chance is a process that
is stopped for seconds between the check and the post, microseconds apart, with a transport that needs no CPU.

Pure; times are seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvbus.bounded import BoundedDict
from kvbus.wire import Echoes

WRITE_LEASE_S = 1.5
MAX_WRITE_S = 2.0
CLOCK_DRIFT = 0.01
"""How much faster one clock may run than the other."""


def term_s(write_lease_s: float = WRITE_LEASE_S, max_write_s: float = MAX_WRITE_S) -> float:
    """How long after its last pulse was heard a prefill rank may have a WRITE running, seconds."""
    return (write_lease_s + max_write_s) * (1 + CLOCK_DRIFT)


MAX_PULSES = 64
MAX_PEERS = 1 << 14
_NEVER = float("-inf")


class SourceLease:
    """A prefill rank's side: what it sent, and what each decode engine's incarnation has echoed of it.

    Args:
        number: gives the next pulse's number; 1, 2, 3 without it.
    """

    def __init__(self, write_lease_s: float = WRITE_LEASE_S, number: Callable[[], int] | None = None) -> None:
        self._write_lease_s, self._chance = write_lease_s, number
        self._number = 0
        self._sent_at: BoundedDict[int, float] = BoundedDict(MAX_PULSES)
        self._until: BoundedDict[tuple[str, int], float] = BoundedDict(MAX_PEERS)

    def pulse(self, now: float) -> int:
        """The number of the pulse that is sent now; call it before sending."""
        self._number = self._chance() if self._chance is not None else self._number + 1
        self._sent_at[self._number] = now
        return self._number

    def echoed(self, sink: str, incarnation: int, number: int) -> None:
        """A decode engine has echoed ``number``; one that was never sent, or long ago, gives no right."""
        sent_at = self._sent_at.get(number)
        if sent_at is not None:
            key = (sink, incarnation)
            self._until[key] = max(self._until.get(key, _NEVER), sent_at + self._write_lease_s)

    def until(self, sink: str, incarnation: int) -> float:
        """The last moment at which a WRITE into this incarnation may be posted."""
        return self._until.get((sink, incarnation), _NEVER)


@dataclass(slots=True)
class _Heard:
    number: int = 0
    at: float = _NEVER
    echoed_at: float = _NEVER
    """When the number echoed last was heard."""


Source = tuple[str, int, int]
"""A prefill engine, its incarnation, a rank of it."""


class SinkLease:
    """A decode engine's side: what it heard of each prefill rank, and echoed."""

    def __init__(self, write_lease_s: float = WRITE_LEASE_S, max_write_s: float = MAX_WRITE_S) -> None:
        self._term_s = term_s(write_lease_s, max_write_s)
        self._heard: BoundedDict[Source, _Heard] = BoundedDict(MAX_PEERS)

    def hear(self, source: Source, number: int, now: float) -> None:
        """A pulse has come. One that is late, or a lie, is echoed as well: it gives no right, or an old one."""
        heard = self._heard.setdefault(source, _Heard())
        heard.number, heard.at = number, now

    def echo(self, engine: str) -> Echoes:
        """What to send to the ranks of ``engine``. Calling it counts as sending it."""
        found = []
        for (name, born, rank), heard in self._heard.items():
            if heard.number and name == engine:
                heard.echoed_at = heard.at
                found.append((name, born, rank, heard.number))
        return tuple(found)

    def incarnation(self, engine: str) -> int:
        """The incarnation of ``engine`` that was heard last, 0 if none was."""
        found = [(heard.at, born) for (name, born, _), heard in self._heard.items() if name == engine]
        return max(found, default=(_NEVER, 0))[1]

    def safe_at(self, engine: str, incarnation: int = 0, ended: Collection[int] = ()) -> float:
        """When no rank of ``engine`` can have a WRITE running any more.

        Ranks ``ended`` of ``incarnation`` are known to have none. Minus infinity if nothing was ever echoed to the
        others. It moves on while echoes are sent.
        """
        return max(
            (
                heard.echoed_at + self._term_s
                for (name, born, rank), heard in self._heard.items()
                if name == engine and not (born == incarnation and rank in ended)
            ),
            default=_NEVER,
        )

    def forget(self, engine: str, incarnation: int, now: float) -> None:
        """This incarnation is gone and nothing waits for it any more."""
        for source in [key for key in self._heard if key[0] == engine and key[1] <= incarnation]:
            if self._heard[source].echoed_at + self._term_s <= now:
                del self._heard[source]
