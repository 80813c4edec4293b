"""A simulated NIXL agent: READs land in real memory, late and in parts, or never.

Like NIXL it cannot cancel a posted READ. Nothing moves while one of the two processes is frozen, or
the target does not drive progress. READs fail soon after their peer was killed, or when its memory
is not registered.

A peer's metadata has its address. UCX connects with the first READ, to the process that listens
there by then, and its keys are addresses. So metadata of a data process that has ended may lead to
the next one, which has other memory at the same addresses.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvbus.data.messages import MemoryKind
from kvbus.data.nixl import PeerMetadata, Registration
from kvbus.errors import PeerLost, RemoteError, TransferFailed
from tests.sim.network import Network

if TYPE_CHECKING:
    from tests.sim.data import SimChild

Rows = npt.NDArray[np.uint64]
STALLED_LOOK_S = 0.02
KILLED_S = 0.05
MOST_PIECES, MOST_EARLIER = 3, 3


@dataclass(slots=True, eq=False)
class Handle:
    """A READ, and its pieces that have not landed."""

    peer: "Peer"
    pieces: list[tuple[Rows, Rows]]
    error: RemoteError | None = None
    is_posted: bool = False

    @property
    def is_terminal(self) -> bool:
        return not (self.is_posted and self.pieces)


@dataclass(slots=True, eq=False)
class Peer:
    """A peer by its metadata; its first READ connects it to ``agent``."""

    name: str
    contact: bytes
    place: str
    agent: "SimNixl | None" = None
    is_broken: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Fabric:
    """All agents of a world, by their addresses.

    A piece takes ``part_s``, and a share ``flips`` of pieces has one bit changed. A share
    ``follows`` of data processes listens where the one before did.
    """

    network: Network
    part_s: float = 300e-6
    flips: float = 0.0
    follows: float = 0.8
    listening: "dict[str, SimNixl]" = field(default_factory=dict)
    _ports: "itertools.count[int]" = field(default_factory=itertools.count)

    def place(self, machine: str, before: str) -> str:
        """An address for an agent; ``before`` is that of the data process before."""
        if before and self.network.world.luck.chance(self.follows):
            return before
        return f"{machine}:{next(self._ports)}"


class SimNixl:
    """The agent of one data process; it stands for `kvbus.data.nixl_agent.NixlAgent`."""

    def __init__(self, fabric: Fabric, host: "SimChild", name: str, place: str) -> None:
        self.name, self.place = name, place
        self.num_moves = 0
        """Handles that the process has prepared, posted or found ended."""
        self._fabric, self.host, self._world = fabric, host, fabric.network.world
        self.registered: list[Registration] = []
        before = fabric.listening.get(place)
        earlier = [] if before is None else [before.registered, *before.earlier]
        self.earlier: list[list[Registration]] = earlier[:MOST_EARLIER]
        """Registrations of the processes before, whose addresses readers may still have."""
        self._peers: dict[str, Peer] = {}
        self._live: dict[Handle, None] = {}
        fabric.listening[place] = self

    @property
    def peers(self) -> list[str]:
        return list(self._peers)

    def register(self, registration: Registration) -> None:
        self.registered.append(registration)

    def deregister(self, registration: Registration) -> None:
        if any(self._targets(handle, registration) for handle in self._live):
            self._world.fail(f"{self.name}: memory is deregistered, and a READ writes into it")
        self.registered.remove(registration)

    def metadata(self, registrations: Sequence[Registration], backend: str) -> bytes:
        return _blob(self.name, self.place)

    def add_peer(self, metadata: PeerMetadata) -> None:
        name, contact = metadata.name, metadata.contact
        known = self._peers.get(name)
        if known is not None and known.contact != contact:
            raise TransferFailed("another peer has that name", peer=name)
        place = _place_of(metadata)
        if self._is_cut(place):
            raise TransferFailed("no way there", peer=name)
        if known is None:
            self._peers[name] = Peer(name, contact, place)

    def remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            raise TransferFailed("no such peer", peer=name)
        if any(handle.peer is peer for handle in self._live):
            self._world.fail(f"{self.name}: peer {name} is removed, and a READ from it is posted")

    def progress(self) -> None:
        """Do nothing: pieces move by themselves; see ``is_driven``."""

    def prepare(
        self, peer: str, local: Rows, remote: Rows, kinds: tuple[MemoryKind, MemoryKind]
    ) -> Handle:
        self.num_moves += 1
        known = self._peers.get(peer)
        if known is None or known.is_broken:
            raise _lost(peer)
        if self._world.lacks_memory():
            raise TransferFailed("no memory for a request", peer=peer)
        num_pieces = min(len(local), 1 + self._world.luck.randrange(MOST_PIECES))
        pieces = [np.array_split(rows, num_pieces) for rows in (local, remote)]
        return Handle(known, list(zip(*pieces, strict=True)))

    def post(self, handle: Handle, peer: str) -> bool:
        self.num_moves += 1
        handle.is_posted = True
        self._live[handle] = None
        for piece in handle.pieces:
            delay_s = self._world.luck.delay_s(self._fabric.part_s)
            self._world.after(delay_s, self._land, handle, piece, False)
        return False

    def is_done(self, handle: Handle, peer: str) -> bool:
        if not handle.is_terminal:
            return False
        self.num_moves += 1
        if handle.error is not None:
            raise handle.error
        return True

    def release(self, handle: Handle) -> bool:
        if not handle.is_terminal:
            self._world.fail(f"{self.name}: a READ is released that may still land")
        self._live.pop(handle, None)
        return True

    def reset(self) -> None:
        """Lose all connections: READs fail until their peer is removed and added again."""
        for peer in self._peers.values():
            self._break(peer)

    def _land(self, handle: Handle, piece: tuple[Rows, Rows], has_seen_death: bool) -> None:
        """Have a piece land, fail, or try again later."""
        if not self.host.is_alive or not any(one is piece for one in handle.pieces):
            return
        peer, world = handle.peer, self._world
        source = peer.agent
        if source is None and not self._is_cut(peer.place):
            source = peer.agent = self._fabric.listening.get(peer.place)
        if source is not None and not source.host.is_alive:
            if has_seen_death:
                self._break(peer)
            else:
                world.after(KILLED_S, self._land, handle, piece, True)
        elif source is None or self._is_stalled(source):
            world.after(STALLED_LOOK_S, self._land, handle, piece, False)
        else:
            handle.error = handle.error or self._copy(source, *piece)
            self._end(handle, piece)

    def _copy(self, source: "SimNixl", local: Rows, remote: Rows) -> RemoteError | None:
        found = [source.find(address, length) for address, length, _ in remote.tolist()]
        if not all(found):
            return TransferFailed("the memory is not registered there", peer=source.name)
        for (target, length, _), address in zip(local.tolist(), found, strict=True):
            if not _contains(self.registered, target, length):
                self._world.fail(f"{self.name}: bytes land where nothing is registered")
            ctypes.memmove(target, address, length)
        if self._world.luck.chance(self._fabric.flips):
            ctypes.c_uint8.from_address(int(local[0, 0])).value ^= 1
        return None

    # Data processes of one agent map the same memories at the same addresses, but not in the same
    # order. Registration number 2 of the process before is number 2 here.
    def find(self, address: int, length: int) -> int:
        """The true address of a reader's bytes; 0 if there is none."""
        if _contains(self.registered, address, length):
            return address
        for earlier in self.earlier:
            for before, now in zip(earlier, self.registered, strict=False):
                offset = address - before.address
                if 0 <= offset < before.size_bytes and offset + length <= now.size_bytes:
                    return now.address + offset
        return 0

    def _end(self, handle: Handle, piece: tuple[Rows, Rows]) -> None:
        handle.pieces = [one for one in handle.pieces if one is not piece]
        if handle.is_terminal:
            self.host.on_moved()

    def _break(self, peer: Peer) -> None:
        """Fail all READs from a peer, also later ones."""
        peer.is_broken = True
        for handle in [one for one in self._live if one.peer is peer]:
            if not handle.is_terminal:
                handle.error, handle.pieces = handle.error or _lost(peer.name), []
                self.host.on_moved()

    def _is_cut(self, place: str) -> bool:
        return self._fabric.network.is_cut(self.host.machine, place.partition(":")[0])

    def _is_stalled(self, source: "SimNixl") -> bool:
        ours, theirs = self.host, source.host
        is_frozen = ours.is_frozen or theirs.is_frozen
        return is_frozen or self._is_cut(source.place) or not theirs.is_driven

    def _targets(self, handle: Handle, registration: Registration) -> bool:
        start, stop = registration.address, registration.address + registration.size_bytes
        return any(
            bool(((local[:, 0] < stop) & (local[:, 0] >= start)).any())
            for local, _ in handle.pieces
        )


def _contains(registered: Sequence[Registration], address: int, length: int) -> bool:
    return any(
        one.address <= address and address + length <= one.address + one.size_bytes
        for one in registered
    )


def _lost(peer: str) -> PeerLost:
    return PeerLost("the peer of a READ is gone", peer=peer)


def _blob(name: str, place: str) -> bytes:
    """Metadata as of NIXL, with no memory."""

    def of(tag: bytes, content: bytes) -> bytes:
        return tag + len(content).to_bytes(8, "little") + content + b"|"

    contact = of(b"Agent", name.encode()) + of(b"Conns", (1).to_bytes(8, "little"))
    contact += of(b"t", b"UCX") + of(b"c", b"\0" + place.encode())
    memory = of(b"", b"MemSection") + of(b"nixlSecElms", (0).to_bytes(8, "little"))
    return b"nixlSerDes|" + contact + memory


def _place_of(metadata: PeerMetadata) -> str:
    return metadata.contact.rpartition(b"\0")[2].rstrip(b"|").decode()
