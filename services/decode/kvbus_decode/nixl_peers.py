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
from kvbus.errors import ErrorCode, LocalError, TransferFailed
from kvbus.protocol.peer import HandshakeDone
from kvbus_decode.mapped import Extent

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


ReadMemory = Callable[[str], Set[NixlMemory]]
"""Returns what routes read from a NIXL agent of one process; stands for that process."""


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A peer of NIXL, the memory that NIXL knows of it, and the processes that have named it.

    The name is no proof: only processes at ``address``, which was the first to name it, renew it.
    """

    name: str
    address: tuple[str, ...]
    data: DataProcess
    memories: tuple[NixlMemory, ...] = ()
    holders: dict[ReadMemory, None] = field(default_factory=dict)
    defined: Defined = field(init=False)
    _is_undriven: bool = False

    def __post_init__(self) -> None:
        self.defined = Defined(AddPeer(peer=self.name, metadata=()), RemovePeer(peer=self.name))

    @property
    def is_undriven(self) -> bool:
        """Whether its last READ ended though the peer drove nothing, as over CMA."""
        return self._is_undriven and self.data.knows(self.defined)

    def note_read(self, is_undriven: bool) -> None:
        self._is_undriven = is_undriven

    def break_off(self) -> None:
        """UCX has given the peer up: it is added again before it is used."""
        self._is_undriven = False
        self.data.forget(self.defined)

    def set_memories(self, memories: Iterable[NixlMemory]) -> None:
        """Have each later data process know these."""
        self.memories = tuple(dict.fromkeys(memories))
        metadata = dict.fromkeys(blob for memory in self.memories for blob in memory.metadata)
        self.defined.add = AddPeer(peer=self.name, metadata=tuple(metadata))

    def takes(self, new: NixlMemory) -> bool:
        """Whether NIXL can know ``new`` beside the rest."""
        known = frozenset[Extent]().union(*(one.extents for one in self.memories))
        ended = known.difference(new.extents, *(one.extents for one in self.read_memory()))
        return len(ended) < MAX_ENDED_EXTENTS and not new.misfits(known)

    def renew(self, new: NixlMemory) -> None:
        """Remove it from NIXL, to be added again with the memory that routes read."""
        log.info("peer.renewed", peer=self.address[0], nixl_agent=self.name)
        self.break_off()
        self.set_memories(one for one in self.read_memory() if not new.misfits(one.extents))

    def read_memory(self) -> set[NixlMemory]:
        """Return the memory that routes read."""
        return set[NixlMemory]().union(*(read(self.name) for read in self.holders))


# NIXL knows a peer from its first READ on, or from the handshake. The data process removes one when
# nothing of it is in flight, and what comes later waits for that:
#
#     UCX gave it up     a READ found no memory, or the network reset the connection: NIXL would use
#                        what is broken. It is removed at once, and added before its next READ
#     memory misfits     it is removed, and added with the memory that routes read
#     another data       nothing is known: each peer is added before its first READ. So metadata
#     process            that ends a data process ends no later one
class NixlPeers:
    """All peers of NIXL, by name. A peer is removed with the last process that has named it."""

    def __init__(self, data: DataProcess) -> None:
        self._data = data
        self._known: dict[str, NixlPeer] = {}

    async def add(self, new: NixlMemory, address: tuple[str, ...], holder: ReadMemory) -> NixlPeer:
        """Have NIXL know ``new`` of a process at an address; for one process, one at a time.

        Fabrics with keys refuse a region that is registered again, after its engine restarted, and
        NIXL has then dropped the peer: it is added again as well. Raises `KVBusError`.
        """
        _check_name(new)
        made = NixlPeer(new.agent, address, self._data)
        known = self._known.setdefault(new.agent, made)
        known.holders[holder] = None
        if known.address == address and not known.takes(new):
            known.renew(new)
        try:
            await self._load(known, new, may_renew=known.address == address)
        except TransferFailed as error:
            raise _unconnected(address[0], error) from error
        return known

    def release(self, holder: ReadMemory, *, but: str = "") -> None:
        """Remove the peers that no other process has named, ``but`` one."""
        for known in list(self._known.values()):
            if known.name != but and holder in known.holders:
                del known.holders[holder]
                if not known.holders:
                    self._remove(known)

    def _remove(self, known: NixlPeer) -> None:
        """Remove a peer, which may have been removed while it was added."""
        if self._known.get(known.name) is known:
            del self._known[known.name]
        self._data.remove(known.defined)

    async def _load(self, known: NixlPeer, new: NixlMemory, *, may_renew: bool) -> None:
        """Raises `KVBusError`; then ``new`` is not kept: the peer has other memory, or its name."""
        if self._data.knows(known.defined):
            try:
                await self._data.call(AddPeer(peer=new.agent, metadata=new.metadata))
            except TransferFailed:
                if not may_renew:
                    raise
                known.renew(new)
        before = known.memories
        known.set_memories([*before, new])
        try:
            await self._data.result(known.defined)
        except BaseException:
            known.set_memories(before)
            if before:
                known.break_off()
            else:
                self._remove(known)
            raise


def _check_name(memory: NixlMemory) -> None:
    """Raise `LocalError` for metadata of another NIXL agent, and `TransferFailed` for none."""
    for blob in memory.metadata:
        name = read_metadata(blob).name
        if name != memory.agent:
            raise LocalError(
                f"metadata of NIXL agent '{name}' came as that of '{memory.agent}'",
                code=ErrorCode.INVALID,
            )


def _unconnected(endpoint: str, error: TransferFailed) -> TransferFailed:
    """UCX says no more than that it knows no way."""
    return TransferFailed(
        f"NIXL does not connect to the agent at {endpoint}: {error.message}. Is what its "
        "data_interfaces (UCX_NET_DEVICES) names on a network that this machine reaches? kvbus "
        "doctor --peer looks",
        endpoint=endpoint,
    )
