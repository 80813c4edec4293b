"""What NIXL is told of peers: their agents, and the memory that each of them has registered.

Refuses to give NIXL memory that overlaps other memory which the peer had before: NIXL never forgets
a peer's registrations, and does not find what lies where another one was.
"""

import asyncio
from collections.abc import Iterable, Set
from dataclasses import dataclass

import anyio
import structlog

from kvbus.errors import ErrorCode, KVBusError, LocalError, TransferFailed
from kvbus.protocol.peer import HandshakeDone
from kvbus.transport import PeerMetadata, Transport
from kvbus_decode.peer.directory import Extent, Peer

log = structlog.get_logger()

MAX_EXTENTS = 1024
"""When so many were registered by one peer, most of them are gone: it is made again."""
RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """Memory of an engine at a peer: NIXL's agent, what loads it there, and where it is."""

    agent: str
    metadata: tuple[bytes, ...]
    extents: frozenset[Extent]

    @classmethod
    def of(cls, done: HandshakeDone) -> "NixlMemory":
        """What a handshake brought."""
        memory = done.memory
        extents = frozenset(
            (addresses[segment.segment_id], addresses[segment.segment_id] + segment.size_bytes)
            for rank, addresses in zip(memory.ranks, memory.addresses, strict=True)
            for segment in (rank.segments if addresses else ())
        )
        return cls(done.nixl_agent, done.nixl_metadata, extents)

    def misfits(self, known: Set[Extent]) -> bool:
        """Whether something known overlaps it, and is not the same."""
        reach = reach_known = 0
        for start, stop in sorted(self.extents | known):
            is_here, is_known = (start, stop) in self.extents, (start, stop) in known
            if (is_here and start < reach_known) or (is_known and start < reach):
                return True
            reach = max(reach, stop) if is_here else reach
            reach_known = max(reach_known, stop) if is_known else reach_known
        return False


class NixlPeers:
    """Adds peers to NIXL and removes them; for one peer, one thing at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def add(
        self, peer: Peer, new: NixlMemory, live: Iterable[NixlMemory], *, deadline: float
    ) -> None:
        """Make ``new`` known; ``live`` is what else of the peer is in use.

        Fabrics with keys refuse a region that is registered again, after its engine restarted, and
        NIXL has then dropped the peer: it is made again as well. So is one that UCX has given up,
        as it does when a READ finds no memory: NIXL goes on with what is broken. Raises
        `KVBusError`, with ``busy`` when transfers from the peer do not end before ``deadline``.
        """
        async with peer.nixl_turn:
            known = peer.nixl_agents.get(new.agent)
            if known is None or self._is_usable(peer, new, known):
                try:
                    await self._load(peer, new)
                except TransferFailed:
                    if known is None:
                        raise
                else:
                    return
            log.info("peer.renewed", peer=peer.endpoint, nixl_agent=new.agent)
            await self._remove(peer, new.agent, deadline)
            for memory in {one for one in live if one.agent == new.agent}:
                if not new.misfits(memory.extents):
                    await self._load(peer, memory)
            await self._load(peer, new)

    @staticmethod
    def _is_usable(peer: Peer, new: NixlMemory, known: Set[Extent]) -> bool:
        """Whether what NIXL has of the agent can be added to."""
        is_broken = new.agent in peer.broken_agents
        return not (is_broken or new.misfits(known) or len(known) >= MAX_EXTENTS)

    async def forget(self, peer: Peer, names: Iterable[str]) -> None:
        """Remove agents of earlier processes; one that still writes to us has to stay."""
        for name in names:
            try:
                await asyncio.wrap_future(self._transport.remove_peer(name))
                _drop(peer, name)
            except KVBusError as error:
                log.warning("peer.kept", peer=peer.endpoint, nixl_agent=name, reason=error.message)

    async def _load(self, peer: Peer, memory: NixlMemory) -> None:
        for blob in memory.metadata:
            name = PeerMetadata.read(blob).name
            if name != memory.agent:
                raise LocalError(
                    f"metadata of NIXL agent '{name}' came as that of '{memory.agent}'",
                    code=ErrorCode.INVALID,
                )
            try:
                await asyncio.wrap_future(self._transport.add_peer(blob))
            except TransferFailed as error:
                raise _unconnected(peer, error) from error
        peer.nixl_agents.setdefault(memory.agent, set()).update(memory.extents)

    async def _remove(self, peer: Peer, name: str, deadline: float) -> None:
        """Remove one, once what was posted to it has ended."""
        while True:
            try:
                await asyncio.wrap_future(self._transport.remove_peer(name))
                break
            except LocalError as error:
                if error.code is not ErrorCode.BUSY or anyio.current_time() >= deadline:
                    raise
            await anyio.sleep(RETRY_S)
        _drop(peer, name)


def _unconnected(peer: Peer, error: TransferFailed) -> TransferFailed:
    """UCX says no more than that it knows no way."""
    return TransferFailed(
        f"NIXL does not connect to the agent at {peer.endpoint}: {error.message}. Is what its "
        "data_interfaces (UCX_NET_DEVICES) names on a network that this machine reaches? kvbus "
        "doctor --peer looks",
        endpoint=peer.endpoint,
    )


def _drop(peer: Peer, name: str) -> None:
    peer.nixl_agents.pop(name, None)
    peer.broken_agents.discard(name)
