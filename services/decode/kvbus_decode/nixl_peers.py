"""What NIXL is told of peers: their agents, and the memory that each of them has registered.

NIXL never forgets a peer's registrations, and does not find what lies where another one was. So a
peer whose new memory overlaps other memory that it had before is made again.
"""

import asyncio
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

import anyio
import structlog

from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, KVBusError, LocalError, TransferFailed
from kvbus.protocol.peer import HandshakeDone
from kvbus.transport import PeerMetadata
from kvbus_decode.peers import Extent, Peer

log = structlog.get_logger()

MAX_ENDED_EXTENTS = 1024
"""An agent is made again when NIXL remembers so many extents of it that no route reads."""
RETRY_S, KEPT_RETRY_S = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """Memory of an engine at a peer: NIXL's agent, what loads it there, and where it is."""

    agent: str
    metadata: tuple[bytes, ...]
    extents: frozenset[Extent]

    @classmethod
    def of(cls, done: HandshakeDone) -> "NixlMemory":
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


@dataclass(slots=True, eq=False)
class NixlPeer:
    """An agent that NIXL knows, all memory that it was told of, and the peer that told it last.

    It ``is_broken`` once UCX has given it up: another one takes its place before the next READ.
    """

    peer: Peer
    extents: set[Extent] = field(default_factory=set)
    is_broken: bool = False

    def takes(self, new: NixlMemory, used: Set[Extent]) -> bool:
        is_full = len(self.extents - used) >= MAX_ENDED_EXTENTS
        return not (self.is_broken or is_full or new.misfits(self.extents))


class NixlPeers:
    """Adds peers to NIXL and removes them; for one peer, one thing at a time.

    ``used`` gives all memory of peers that routes read. What NIXL knows outlives the connection to
    a peer: a process that is met again may have memory where it had other memory before.
    """

    def __init__(self, agent: Agent, used: Callable[[], Iterable[NixlMemory]]) -> None:
        self._transport, self._tasks, self._used = agent.transport, agent.tasks, used
        self._known: dict[str, NixlPeer] = {}

    async def add(self, peer: Peer, new: NixlMemory, *, deadline: float) -> None:
        """Make ``new`` known.

        Fabrics with keys refuse a region that is registered again, after its engine restarted, and
        NIXL has then dropped the peer: it is made again as well. So is one that UCX has given up,
        as it does when a READ finds no memory: NIXL goes on with what is broken. Raises
        `KVBusError`, with ``busy`` when transfers from the peer do not end before ``deadline``.
        """
        async with peer.nixl_turn:
            known = self._known.get(new.agent)
            if known is None or known.peer.address != peer.address:
                await self._load(peer, new)  # the name is no proof: only its own is added to it
                return
            known.peer = peer
            others = {one for one in self._used() if one.agent == new.agent}
            if known.takes(new, new.extents.union(*(one.extents for one in others))):
                try:
                    await self._load(peer, new)
                except TransferFailed:
                    pass
                else:
                    return
            log.info("peer.renewed", peer=peer.endpoint, nixl_agent=new.agent)
            await self._remove(peer, new.agent, deadline)
            for memory in {one for one in self._used() if one.agent == new.agent}:  # as of now
                if not new.misfits(memory.extents):
                    await self._load(peer, memory)
            await self._load(peer, new)

    def find(self, name: str) -> NixlPeer | None:
        return self._known.get(name)

    def forget(self, peer: Peer) -> None:
        """Remove the agents of a peer that no route reads from, once nothing of them is in flight.

        One that another peer at its place has told of since is kept.
        """
        for name in [name for name, known in self._known.items() if known.peer is peer]:
            self._tasks.start_soon(self._forget, peer, name)

    async def _forget(self, peer: Peer, name: str) -> None:
        is_told = False
        while (known := self._known.get(name)) is not None and known.peer is peer:
            if any(one.agent == name for one in self._used()):
                return
            try:
                await self._remove(peer, name)
            except KVBusError as error:
                if not is_told:
                    reason = error.message
                    log.warning("peer.kept", peer=peer.endpoint, nixl_agent=name, reason=reason)
                if error.code is not ErrorCode.BUSY:
                    return
                is_told = True
                await anyio.sleep(KEPT_RETRY_S)

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
        self._known.setdefault(memory.agent, NixlPeer(peer)).extents.update(memory.extents)

    async def _remove(self, peer: Peer, name: str, deadline: float = 0.0) -> None:
        """Remove an agent, once what was posted to it has ended; raises `KVBusError`."""
        while True:
            try:
                await asyncio.wrap_future(self._transport.remove_peer(name))
                break
            except LocalError as error:
                if error.code is not ErrorCode.BUSY or anyio.current_time() >= deadline:
                    raise
            await anyio.sleep(RETRY_S)
        if (known := self._known.get(name)) is not None and known.peer is peer:
            del self._known[name]  # else it is added again, behind this


def _unconnected(peer: Peer, error: TransferFailed) -> TransferFailed:
    """UCX says no more than that it knows no way."""
    return TransferFailed(
        f"NIXL does not connect to the agent at {peer.endpoint}: {error.message}. Is what its "
        "data_interfaces (UCX_NET_DEVICES) names on a network that this machine reaches? kvbus "
        "doctor --peer looks",
        endpoint=peer.endpoint,
    )
