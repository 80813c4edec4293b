"""Peers of NIXL, and the memory that each has registered.

NIXL cannot resolve a registration that overlaps an earlier one. A peer with such memory is removed
and added again.
"""

from collections.abc import Callable, Container, Iterable, Set
from dataclasses import dataclass, field

import structlog

from kvbus.data.client import DataProcess, Defined
from kvbus.data.messages import UCX, AddPeer, RemovePeer
from kvbus.data.metadata import read_metadata
from kvbus.errors import ErrorCode, LocalError, TransferFailed
from kvbus.protocol.peer import HandshakeDone
from kvbus_decode.mapped import Extent

log = structlog.get_logger()

MAX_ENDED_EXTENTS = 1024
"""A peer with this many extents without a route is added again."""


@dataclass(frozen=True, slots=True)
class NixlMemory:
    agent: str
    metadata: tuple[bytes, ...]
    extents: frozenset[Extent]
    backend: str = UCX

    @classmethod
    def of(cls, done: HandshakeDone) -> "NixlMemory":
        memory = done.memory
        extents = frozenset(
            (addresses[segment.segment_id], addresses[segment.segment_id] + segment.size_bytes)
            for rank, addresses in zip(memory.ranks, memory.addresses, strict=True)
            for segment in (rank.segments if addresses else ())
        )
        return cls(done.nixl_agent, done.nixl_metadata, extents, done.nixl_backend)

    def misfits(self, known: Set[Extent]) -> bool:
        """Return whether a known extent overlaps one here without being equal."""
        reach = reach_known = 0
        for start, stop in sorted(self.extents | known):
            is_here, is_known = (start, stop) in self.extents, (start, stop) in known
            if (is_here and start < reach_known) or (is_known and start < reach):
                return True
            reach = max(reach, stop) if is_here else reach
            reach_known = max(reach_known, stop) if is_known else reach_known
        return False


ReadMemory = Callable[[str], Set[NixlMemory]]
"""Memory that routes read from a NIXL agent; also identifies their process."""


@dataclass(slots=True, eq=False)
class NixlPeer:
    """NIXL peer, and the processes that have named it.

    A name is not authenticated: only ``address``, the first to name the peer, may renew it.
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
        return self._is_undriven and self.data.knows(self.defined)

    def note_read(self, is_undriven: bool) -> None:
        self._is_undriven = is_undriven

    def break_off(self) -> None:
        """Add the peer again before its next use: UCX has closed the connection."""
        self._is_undriven = False
        self.data.redefine(self.defined)

    def set_memories(self, memories: Iterable[NixlMemory]) -> None:
        self.memories = tuple(dict.fromkeys(memories))
        metadata = dict.fromkeys(blob for memory in self.memories for blob in memory.metadata)
        self.defined.add = AddPeer(peer=self.name, metadata=tuple(metadata))

    def takes(self, new: NixlMemory) -> bool:
        known = frozenset[Extent]().union(*(one.extents for one in self.memories))
        ended = known.difference(new.extents, *(one.extents for one in self.read_memory()))
        return len(ended) < MAX_ENDED_EXTENTS and not new.misfits(known)

    def renew(self, new: NixlMemory) -> None:
        log.info("peer.renewed", peer=self.address[0], nixl_agent=self.name)
        self.break_off()
        self.set_memories(one for one in self.read_memory() if not new.misfits(one.extents))

    def read_memory(self) -> set[NixlMemory]:
        return set[NixlMemory]().union(*(read(self.name) for read in self.holders))


# A peer is added to NIXL in the handshake, or before its first READ. The data process removes it
# when nothing of it is in flight; later jobs wait for that:
#
#     UCX closed the     A READ found no memory, or the network reset the connection. NIXL would use
#     connection         the broken one. The peer is removed, and added before its next READ
#
#     memory misfits     The peer is removed, and added with the memory that routes read
#
#     another data       It knows no peers: each is added before its first READ. So metadata that
#     process            crashes a data process does not crash the next one
class NixlPeers:
    def __init__(self, data: DataProcess) -> None:
        self._data = data
        self._known: dict[str, NixlPeer] = {}

    async def add(self, new: NixlMemory, address: tuple[str, ...], holder: ReadMemory) -> NixlPeer:
        """Add memory to NIXL; one call at a time per process. Raises `KVBusError`."""
        _check_metadata(new, self._data.backends)
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
        for known in list(self._known.values()):
            if known.name != but and holder in known.holders:
                del known.holders[holder]
                if not known.holders:
                    self._remove(known)

    def _remove(self, known: NixlPeer) -> None:
        if self._known.get(known.name) is known:  # else removed while it was added
            del self._known[known.name]
        self._data.remove(known.defined)

    async def _load(self, known: NixlPeer, new: NixlMemory, *, may_renew: bool) -> None:
        """After a `KVBusError` the peer keeps its earlier memory, or is removed."""
        if self._data.knows(known.defined):
            try:
                await self._data.call(AddPeer(peer=new.agent, metadata=new.metadata))
            except TransferFailed:
                if not may_renew:
                    raise
                # A fabric with memory keys refuses a region that a restarted engine registers
                # again. NIXL then drops the peer.
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


def _check_metadata(memory: NixlMemory, backends: Container[str]) -> None:
    if memory.backend not in backends:
        raise LocalError(
            f"the prefill agent chose the NIXL backend {memory.backend}, which was not offered",
            code=ErrorCode.INVALID,
        )
    for blob in memory.metadata:
        read = read_metadata(blob)
        if (read.name, read.backend) != (memory.agent, memory.backend):
            raise LocalError(
                f"metadata of NIXL agent '{read.name}' for {read.backend} came as that of "
                f"'{memory.agent}' for {memory.backend}",
                code=ErrorCode.INVALID,
            )


def _unconnected(endpoint: str, error: TransferFailed) -> TransferFailed:
    return TransferFailed(
        f"NIXL does not connect to the agent at {endpoint}: {error.message}. Is what its "
        "data_interfaces (UCX_NET_DEVICES) names on a network that this machine reaches? kvbus "
        "doctor --peer checks it",
        endpoint=endpoint,
    )
