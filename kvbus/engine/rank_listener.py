"""A rank on the bus: brings what the bus says to the writer thread, and fetches the metadata of decode engines.

Fetching begins when a decode engine's heartbeat is first heard, so that no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbus.bus import Node
from kvbus.engine.items import AddPeer, Greet, Item, Overheard
from kvbus.errors import BusUnavailableError, MessageError
from kvbus.protocol import Change, PeerJoined, PeerLeft, differences
from kvbus.protocol.prefill import PooledCancel, PooledRegistration, Released, SinkLeft, SinkRefused
from kvbus.wire import (
    Cancel,
    CancelAck,
    Delivered,
    Heartbeat,
    LeaseEcho,
    Message,
    MetadataReply,
    MetadataRequest,
    PrefillCompleted,
    PrefillFailed,
    PrefillProgress,
    Pulse,
    Registration,
    RegistrationAck,
    Release,
    Role,
    TransferDone,
    TransferFailed,
    TransferStarted,
    Wanted,
    is_token,
)

logger = logging.getLogger(__name__)


def sinks_of(own: Heartbeat) -> tuple[Role, ...]:
    """The roles whose heartbeats a rank needs: those of engines that it may write into."""
    return tuple(each for each in Role if own.may_write_into(replace(own, role=each)))


METADATA_TIMEOUT_S = 2.0
METADATA_RETRY_S = 0.5


class RankNode:
    """See the module's docstring.

    Args:
        own: this engine's heartbeat, to compare with.
        submit: hands an item to the writer thread.
        peer_ranks: ranks of a peer of so many ranks into which this rank writes.
    """

    def __init__(
        self,
        node: Node,
        own: Heartbeat,
        rank: int,
        submit: Callable[[Item], None],
        peer_ranks: Callable[[int], Sequence[int]],
    ) -> None:
        self._node, self._own, self._submit, self._peer_ranks = node, own, submit, peer_ranks
        self._fetching: set[tuple[str, int]] = set()
        subjects, me = node.subjects, own.engine
        if own.writes:
            node.listen(subjects.registrations(me), (Registration, Wanted, Delivered), submit)
            node.listen(subjects.cancels(me), Cancel, submit)
            node.listen(subjects.echoes(me), LeaseEcho, submit)
            words = (PrefillProgress, PrefillCompleted, PrefillFailed)
            node.listen(subjects.prefill(me), words, lambda word: submit(Overheard(word)))
            # These need no seal: a lie lets nothing be written, and costs a transfer at most.
        if own.role.prefills:
            node.listen(subjects.pool(), (Registration, Wanted), self._submit_pooled, sealed=False)
            node.listen(subjects.cancels_pool(), Cancel, lambda cancel: submit(PooledCancel(cancel)), sealed=False)
            node.listen(subjects.releases(me), Release, lambda word: submit(Released(word)))
        if own.is_written:
            # An engine that asks for this rank's metadata is about to make contact. None of these needs a seal:
            # they only say when to look.
            node.listen(subjects.metadata(me, rank), MetadataRequest, lambda _: submit(Greet()), sealed=False)
            news = (TransferStarted, TransferDone, TransferFailed)
            node.listen(subjects.transfers(me), news, submit, sealed=False)
        node.watch_peers(self._on_peer)

    def _submit_pooled(self, message: Registration | Wanted) -> None:
        if isinstance(message, Registration):
            self._submit(PooledRegistration(message))
        else:
            self._submit(replace(message, attempt=0))  # unsealed, so what it says of the attempt does not count

    def publish(self, engine: str, message: Message) -> None:
        """Send what the rank says, to the decode engine ``engine`` or, if it is empty, to all. Any thread."""
        subjects, me = self._node.subjects, self._own.engine
        if isinstance(message, Pulse):
            pulses = subjects.pulses if self._own.role.prefills else subjects.history_pulses
            self._node.publish(pulses(me), message)
            return
        if not is_token(engine):
            self._node.counters.add("rejected: no engine's id")  # in the pool anybody may register
            return
        is_ack = isinstance(message, RegistrationAck | CancelAck | PrefillProgress | PrefillCompleted | PrefillFailed)
        subject = subjects.acks(engine, me) if is_ack else subjects.transfers(engine, me)
        self._node.publish(subject, message, to=engine)

    def introduce(self, engine: str) -> None:
        """Find out about a decode engine that registered before it was known. Any thread."""
        self._node.call(self._introduce, engine)

    def _introduce(self, engine: str) -> None:
        peer = self._node.membership.get(engine)
        if peer is None:
            self._node.ask_who()
        else:
            self._meet(peer)

    def _on_peer(self, change: Change) -> None:
        match change:
            case PeerJoined(heartbeat):
                if self._own.may_write_into(heartbeat):
                    self._meet(heartbeat)
            case PeerLeft(engine, incarnation, _, _) if self._own.writes:
                self._submit(SinkLeft(engine, incarnation))
            case _:
                pass

    def _meet(self, peer: Heartbeat) -> None:
        if peer.engine == self._own.engine:
            return
        if differing := differences(self._own, peer):
            self._node.counters.add("peers_refused")
            logger.error("kvbus: decode engine %s does not fit: %s", peer.engine, "; ".join(differing))
            self._submit(SinkRefused(peer.engine, peer.incarnation, f"incompatible: {differing[0]}"[:256]))
            return
        key = (peer.engine, peer.incarnation)
        if key not in self._fetching:
            self._fetching.add(key)
            self._node.spawn(self._fetch(peer), f"metadata-of-{peer.engine}")

    async def _fetch(self, peer: Heartbeat) -> None:
        try:
            metadata: dict[int, bytes] = {}
            for rank in self._peer_ranks(peer.tp_size):
                while rank not in metadata:
                    payload = await self._ask(peer, rank)
                    current = self._node.membership.get(peer.engine)
                    if current is None or current.incarnation != peer.incarnation:
                        return  # it left meanwhile; its successor's heartbeat begins anew
                    if payload is None:
                        await asyncio.sleep(METADATA_RETRY_S)
                    else:
                        metadata[rank] = payload
            self._submit(AddPeer(peer.engine, peer.incarnation, peer.tp_size, metadata))
        finally:
            self._fetching.discard((peer.engine, peer.incarnation))

    async def _ask(self, peer: Heartbeat, rank: int) -> bytes | None:
        me = self._own
        subject = self._node.subjects.metadata(peer.engine, rank, me.engine)
        asked = MetadataRequest(me.engine, peer.incarnation, me.incarnation)
        try:
            reply = await self._node.request(subject, asked, METADATA_TIMEOUT_S, to=peer.engine)
        except (BusUnavailableError, MessageError) as error:
            logger.debug("kvbus: no metadata of engine %s rank %d yet, asking again: %s", peer.engine, rank, error)
            return None
        if not isinstance(reply, MetadataReply) or reply.incarnation != peer.incarnation or reply.rank != rank:
            return None
        if self._node.keys is None or not reply.payload:
            return reply.payload or None
        return self._node.keys.decrypt(reply.payload, (peer.engine, peer.incarnation))
