"""What NIXL knows of peers: their agents, and the memory that each of them has registered.

NIXL never forgets a peer's registrations, and does not find what lies where another one was. So a
peer whose new memory overlaps other memory that it had before is removed and added again.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

import structlog

from kvbus.data.client import DataProcess, Defined
from kvbus.data.messages import AddPeer, RemovePeer
from kvbus.data.metadata import read_metadata
from kvbus.errors import ErrorCode, KVBusError, LocalError, PeerLost, TransferFailed
from kvbus.protocol.peer import HandshakeDone
from kvbus_decode.peers import Extent, Peer

log = structlog.get_logger()

MAX_ENDED_EXTENTS = 1024
"""A peer is added again when NIXL remembers so many extents of it that no route reads."""


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
    """A peer of NIXL, the memory that NIXL knows of it, and the peer that brought it last."""

    name: str
    peer: Peer
    memories: frozenset[NixlMemory] = frozenset()
    defined: Defined = field(init=False)
    is_undriven: bool = False
    """Whether its last READ ended though the peer drove nothing, as over CMA."""

    def __post_init__(self) -> None:
        self.defined = Defined(AddPeer(peer=self.name, metadata=()), RemovePeer(peer=self.name))

    def set_memories(self, memories: Iterable[NixlMemory]) -> None:
        """Have each later data process know these."""
        self.memories = frozenset(memories)
        metadata = dict.fromkeys(blob for memory in self.memories for blob in memory.metadata)
        self.defined.add = AddPeer(peer=self.name, metadata=tuple(metadata))

    def takes(self, new: NixlMemory, used: Iterable[NixlMemory]) -> bool:
        """Whether NIXL can know ``new`` beside the rest; ``used`` is what routes read."""
        known = frozenset[Extent]().union(*(one.extents for one in self.memories))
        ended = known.difference(new.extents, *(one.extents for one in used))
        return len(ended) < MAX_ENDED_EXTENTS and not new.misfits(known)


# NIXL knows a peer from its first READ on, or from the handshake. The data process removes one when
# nothing of it is in flight, and what comes later waits for that:
#
#     UCX gave it up     a READ found no memory, or the network reset the connection: NIXL would use
#                        what is broken. It is removed at once, and added before its next READ
#     memory misfits     it is removed, and added with the memory that routes read
#     another data       nothing is known: each peer is added before its first READ. So metadata
#     process            that ends a data process ends no later one
class NixlPeers:
    """Adds peers to NIXL and removes them; for one peer, one thing at a time.

    ``used`` returns all memory of peers that routes read. What NIXL knows outlives the connection
    to a peer: a process that is met again may have memory where it had other memory before.
    """

    def __init__(self, data: DataProcess, used: Callable[[], Iterable[NixlMemory]]) -> None:
        self._data, self._used = data, used
        self._known: dict[str, NixlPeer] = {}

    async def add(self, peer: Peer, new: NixlMemory) -> Defined:
        """Have NIXL know ``new``, and return what READs from there use.

        Fabrics with keys refuse a region that is registered again, after its engine restarted, and
        NIXL has then dropped the peer: it is added again as well. Raises `KVBusError`.
        """
        _check_name(new)
        async with peer.nixl_turn:
            known = self._known.setdefault(new.agent, NixlPeer(new.agent, peer))
            if known.peer.address == peer.address:  # the name is no proof
                known.peer = peer
                if not known.takes(new, self._read_from(new.agent)):
                    self._renew(known, new)
            try:
                await self._load(known, new)
            except TransferFailed as error:
                raise _unconnected(peer, error) from error
            return known.defined

    def is_undriven(self, name: str) -> bool:
        """Whether READs from the peer seem to end though it drives nothing, as they do over CMA."""
        known = self._known.get(name)
        return known is not None and known.is_undriven and self._data.knows(known.defined)

    def note_read(self, name: str, is_undriven: bool, error: KVBusError | None) -> None:
        """A READ from a peer has ended. If UCX gave the peer up, it is removed."""
        known = self._known.get(name)
        if known is not None and error is None:
            known.is_undriven = is_undriven
        elif isinstance(error, PeerLost):
            self.break_off(name)

    def break_off(self, name: str) -> None:
        """UCX has given the peer up: it is added again before it is used."""
        if (known := self._known.get(name)) is not None:
            known.is_undriven = False
            self._data.forget(known.defined)

    def forget(self, peer: Peer, *, but: str = "") -> None:
        """Remove what no route reads from at a peer, ``but`` one."""
        wanted = {one.agent for one in self._used()} | {but}
        for known in list(self._known.values()):
            if known.peer is peer and known.name not in wanted:
                self._remove(known)

    def _remove(self, known: NixlPeer) -> None:
        """Remove a peer, which may have been removed while it was added."""
        if self._known.get(known.name) is known:
            del self._known[known.name]
        self._data.remove(known.defined)

    async def _load(self, known: NixlPeer, new: NixlMemory) -> None:
        """Raises `KVBusError`; then ``new`` is not kept: the peer has other memory, or its name."""
        if self._data.knows(known.defined):
            try:
                await self._data.call(AddPeer(peer=new.agent, metadata=new.metadata))
            except TransferFailed:
                self._renew(known, new)
        before = known.memories
        known.set_memories({*before, new})
        try:
            await self._data.result(known.defined)
        except BaseException:
            known.set_memories(before)
            if before:
                self.break_off(new.agent)
            else:
                self._remove(known)
            raise

    def _renew(self, known: NixlPeer, new: NixlMemory) -> None:
        """Remove a peer, which is added again with the memory that routes read."""
        log.info("peer.renewed", peer=known.peer.endpoint, nixl_agent=new.agent)
        self.break_off(new.agent)
        read = self._read_from(new.agent)
        known.set_memories(one for one in read if not new.misfits(one.extents))

    def _read_from(self, name: str) -> set[NixlMemory]:
        return {one for one in self._used() if one.agent == name}


def _check_name(memory: NixlMemory) -> None:
    """Raise `LocalError` for metadata of another NIXL agent, and `TransferFailed` for none."""
    for blob in memory.metadata:
        name = read_metadata(blob).name
        if name != memory.agent:
            raise LocalError(
                f"metadata of NIXL agent '{name}' came as that of '{memory.agent}'",
                code=ErrorCode.INVALID,
            )


def _unconnected(peer: Peer, error: TransferFailed) -> TransferFailed:
    """UCX says no more than that it knows no way."""
    return TransferFailed(
        f"NIXL does not connect to the agent at {peer.endpoint}: {error.message}. Is what its "
        "data_interfaces (UCX_NET_DEVICES) names on a network that this machine reaches? kvbus "
        "doctor --peer looks",
        endpoint=peer.endpoint,
    )
