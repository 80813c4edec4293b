"""The interface of NIXL as the data process uses it. Importing this does not load NIXL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbus.data.messages import MemoryKind
from kvbus.data.slicing import Rows
from kvbus.errors import TransferFailed

Handle = Any
"""A transfer handle of NIXL."""


class HandleForgotten(TransferFailed):
    """NIXL dropped the peer of a live handle: bytes can still land, and no state will show it."""


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """Local memory that NIXL may read into and that peers may read."""

    address: int
    size_bytes: int
    device: int
    memory: MemoryKind


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """A blob of a peer that NIXL may get: the name of its NIXL agent, and how to connect to it."""

    name: str
    contact: bytes
    blob: bytes


class Nixl(Protocol):
    """One NIXL agent with a UCX backend; all calls are made by one thread."""

    def register(self, registration: Registration) -> None:
        """Register memory. Raises `SegmentError`."""
        ...

    def deregister(self, registration: Registration) -> None:
        """Deregister memory that no handle targets. Raises `SegmentError`."""
        ...

    def metadata(self, registrations: Sequence[Registration]) -> bytes:
        """Return what a peer needs to connect and to read these, all of one kind of memory."""
        ...

    def add_peer(self, metadata: PeerMetadata) -> None:
        """Add a peer, or new memory of a known one. Raises `TransferFailed`."""
        ...

    def remove_peer(self, name: str) -> None:
        """Remove a peer that no handle refers to. Raises `RemoteError`."""
        ...

    def progress(self) -> None:
        """Drive UCX, as initiator and as target. Raises `TransferFailed`."""
        ...

    def prepare(
        self, peer: str, local: Rows, remote: Rows, kinds: tuple[MemoryKind, MemoryKind]
    ) -> Handle:
        """Return a READ handle that is not posted yet. Raises `RemoteError`."""
        ...

    def post(self, handle: Handle, peer: str) -> bool:
        """Post a handle; return whether it is done. Raises `RemoteError`."""
        ...

    def is_done(self, handle: Handle, peer: str) -> bool:
        """Return whether a posted handle is done. Raises `RemoteError`, `HandleForgotten`."""
        ...

    def release(self, handle: Handle) -> bool:
        """Release a handle that has ended; return whether NIXL did."""
        ...


OpenNixlAgent = Callable[[str], Nixl]
"""Opens an agent of that name. Raises `TransferFailed`."""
LoadNixl = Callable[[], OpenNixlAgent]
"""Loads the library, in a thread: that takes most of the time. Raises `TransferFailed`."""
