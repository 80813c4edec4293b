"""Messages of the attach socket: who an engine process is, and the memory that it passes."""

from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import Name
from kvbus.protocol.message import Empty, Id, Message, Request, Text

CudaHandle = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


FEATURES = ("cuda", "end_codes", "release_offer")
"""What an agent of this version can do besides the first one; see ``docs/protocol.md``."""


class Welcome(Message, frozen=True):
    """Reply to `Hello`: who the agent is, where its other sockets are, and what it can.

    ``features`` are names: one that an agent does not list it cannot do.
    """

    protocol: int
    agent_id: Id
    agent_boot: Id
    role: AgentRole
    engine_endpoint: Id
    peer_endpoint: Id
    events_endpoint: Id
    features: tuple[Id, ...] = ()
    server_key: Text = ""


class Hello(Request[Welcome], frozen=True):
    """First message on an attach connection; ``boot`` is the one used on the engine socket."""

    op: ClassVar[str] = "hello"

    min_protocol: int
    max_protocol: int
    engine_id: Id
    boot: Name


class SegmentPassed(Message, frozen=True):
    """Reply to `PassSegment`; ``sealed`` is False when the engine could still shrink the file."""

    sealed: bool


class PassSegment(Request[SegmentPassed], frozen=True):
    """Passes one file descriptor of shared memory, of at least ``size_bytes``.

    With ``direct`` False NIXL is not told of it, and no NIC reads or writes it: a rank with such a
    segment is *unregistered*, its KV goes through the agent's slots, or stays on this machine.
    """

    op: ClassVar[str] = "segment"

    segment_id: Id
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    direct: bool = True


class PassCuda(Request[Empty], frozen=True):
    """Passes memory of a GPU, by the handles of CUDA's driver; the rank is unregistered.

    ``event`` is one that the engine records before it says that KV is ready, or that its blocks
    may be written; None when it waits for its GPU work before it says so.
    """

    op: ClassVar[str] = "cuda"

    segment_id: Id
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    handle: CudaHandle
    offset_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    event: CudaHandle | None = None


ATTACH_REQUESTS: tuple[type[Request[Any]], ...] = (Hello, PassSegment, PassCuda)
