"""Interface of NIXL. Importing this does not load it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbus.data.messages import Backends, MemoryKind
from kvbus.data.slicing import Rows
from kvbus.errors import TransferFailed

Handle = Any


class HandleForgotten(TransferFailed):
    """NIXL dropped the peer of a live handle: bytes can still land."""


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    address: int
    size_bytes: int
    device: int
    memory: MemoryKind


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    name: str
    backend: str
    contact: bytes
    blob: bytes


class Nixl(Protocol):
    """NIXL agent with its backends. One thread makes all calls."""

    def register(self, registration: Registration) -> None:
        """Register memory with each backend. Raises `SegmentError`."""
        ...

    def deregister(self, registration: Registration) -> None:
        """No handle may target the memory. Raises `SegmentError`."""
        ...

    def metadata(self, registrations: Sequence[Registration], backend: str) -> bytes:
        """Return what a peer needs to connect by ``backend`` and to read these, all of one kind of
        memory.
        """
        ...

    def add_peer(self, metadata: PeerMetadata) -> None:
        """Also adds new memory of a known peer. Raises `TransferFailed`."""
        ...

    def remove_peer(self, name: str) -> None:
        """No handle may refer to the peer. Raises `RemoteError`."""
        ...

    def progress(self) -> None:
        """Drive the backends, as initiator and as target. Raises `TransferFailed`."""
        ...

    def prepare(
        self, peer: str, local: Rows, remote: Rows, kinds: tuple[MemoryKind, MemoryKind]
    ) -> Handle:
        """Raises `RemoteError`."""
        ...

    def post(self, handle: Handle, peer: str) -> bool:
        """Return whether the handle is done. Raises `RemoteError`."""
        ...

    def is_done(self, handle: Handle, peer: str) -> bool:
        """Raises `RemoteError`, `HandleForgotten`."""
        ...

    def release(self, handle: Handle) -> bool:
        """Release an ended handle; return whether NIXL did."""
        ...


OpenNixlAgent = Callable[[str], Nixl]
LoadNixl = Callable[[Backends], OpenNixlAgent]
"""Call it in a thread: it is the slowest step. Raises `TransferFailed`, `ConfigError`."""
