"""Membership: which engines are there, by their heartbeats. Pure; time is an argument.

The one rule: of one engine id one incarnation is a member, the newest that had not to push out one which still speaks;
what others say is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

from kvbus.bounded import Deadlines
from kvbus.wire import Bye, Heartbeat, Role, State, farewell_of

MAX_PEERS = 4096
# Heard twice a second from each engine, so it must not cost building a message.
_WORDS = attrgetter(*(field.name for field in fields(Heartbeat) if field.name != "number"))
# What an incarnation has once said of itself does not change, so whoever says otherwise is not it.
_FIXED = attrgetter(
    "role",
    "tp_size",
    "compat",
    "data_parallel",
    "data_parallel_rank",
    "public_key",
    "farewell",
    "history",
    "first_token",
    "cache_block_size",
)
TO_ALL_INTERVAL_S = 2.0
"""How often an engine's heartbeat is heard by other engines, at least."""
# A new incarnation takes the place of one that was silent for so long. One that still speaks is not gone.
YIELD_S = 2.5
SUSPECT_S = 1.0  # a client that connects again does so, and announces itself, in a fraction of it


def to_all_interval_s(heartbeat_interval_s: float, dead_after_s: float) -> float:
    """How often other engines must hear a heartbeat, seconds: one may be lost before its sender is taken for gone."""
    return max(heartbeat_interval_s, min(TO_ALL_INTERVAL_S, dead_after_s / 2.5))


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A new incarnation of an engine is there."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A member says something new of itself."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """This incarnation is gone: it said so, was silent for too long, or was replaced."""

    engine: str
    incarnation: int
    role: Role
    reason: str


Change = PeerJoined | PeerChanged | PeerLeft


class Membership:
    """The table of engines.

    Args:
        dead_after_s: an engine silent for so long is taken for gone, seconds.
    """

    def __init__(self, *, dead_after_s: float = 3.0, max_peers: int = MAX_PEERS) -> None:
        self._dead_after_s, self._max_peers = dead_after_s, max_peers
        self._yield_s = min(YIELD_S, dead_after_s / 2)  # longer than to_all_interval_s()
        self._peers: dict[str, Heartbeat] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._heard_at: dict[str, float] = {}
        self.rejected = 0

    def __getitem__(self, engine: str) -> Heartbeat:
        return self._peers[engine]

    def get(self, engine: str) -> Heartbeat | None:
        return self._peers.get(engine)

    def peers(self, *, prefill: bool = False, decode: bool = False, ready: bool = False) -> list[Heartbeat]:
        """Members that do what is asked for, by engine id."""
        return [
            peer
            for peer in self._peers.values()
            if (not prefill or peer.role.prefills)
            and (not decode or peer.role.decodes)
            and (not ready or peer.state is State.READY)
        ]

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def hear(self, message: Heartbeat | Bye, now: float) -> list[Change]:
        """An engine has spoken."""
        known = self._peers.get(message.engine)
        if known is not None and message.incarnation < known.incarnation:
            self.rejected += 1
            return []
        if isinstance(message, Bye):
            if known is None or message.incarnation != known.incarnation or not _is_farewell(message, known):
                self.rejected += known is not None
                return []
            return [self._drop(known, "left")]
        if known is None and len(self._peers) >= self._max_peers:
            self.rejected += 1
            return []
        changes: list[Change] = []
        if known is not None and message.incarnation > known.incarnation:
            if now - self._heard_at[message.engine] < self._yield_s:
                self.rejected += 1
                return []
            changes.append(self._drop(known, "replaced"))
            known = None
        if known is not None and (_FIXED(known) != _FIXED(message) or known.address not in ("", message.address)):
            self.rejected += 1
            return []
        self._peers[message.engine] = message
        self._heard_at[message.engine] = now
        self._deadlines.set(message.engine, now + self._dead_after_s)
        if known is None:
            self._peers = dict(sorted(self._peers.items()))  # here, not in peers(), which is asked for each request
            changes.append(PeerJoined(message))
        elif _WORDS(known) != _WORDS(message):
            changes.append(PeerChanged(message))
        return changes

    def tick(self, now: float) -> list[Change]:
        """Drop whom nothing was heard from."""
        return [self._drop(self._peers[engine], "silent") for engine in self._deadlines.pop_due(now)]

    def suspect(self, engine: str, incarnation: int, now: float) -> None:
        """Its connection is gone: it has little time to speak again. Unknown ones are ignored."""
        known = self._peers.get(engine)
        if known is not None and known.incarnation == incarnation:
            self._heard_at[engine] = float("-inf")
            due = self._deadlines.get(engine)
            self._deadlines.set(engine, now + SUSPECT_S if due is None else min(due, now + SUSPECT_S))

    def excuse_silence(self, now: float) -> None:
        """We were deaf ourselves (the bus was away): everybody gets a full term from now on."""
        for engine in self._peers:
            self._deadlines.set(engine, now + self._dead_after_s)

    def _drop(self, peer: Heartbeat, reason: str) -> PeerLeft:
        del self._peers[peer.engine], self._heard_at[peer.engine]
        self._deadlines.drop(peer.engine)
        return PeerLeft(peer.engine, peer.incarnation, peer.role, reason)


def _is_farewell(bye: Bye, member: Heartbeat) -> bool:
    return not member.farewell or farewell_of(bye.word) == member.farewell


def differences(ours: Heartbeat, theirs: Heartbeat) -> list[str]:
    """What keeps two engines from exchanging KV, a line for each; empty if nothing does."""
    if ours.compat == theirs.compat:  # as a rule; routers ask this of every engine for every request
        return []
    mine, other = dict(ours.compat), dict(theirs.compat)
    return [
        f"{key}: {mine.get(key, 'unset')} here, {other.get(key, 'unset')} on {theirs.engine}"
        for key in sorted(mine.keys() | other.keys())
        if mine.get(key) != other.get(key)
    ]
