"""Messages of the Unix sockets: an engine passes memory, a prefill agent lends it."""

from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import Name
from kvbus.protocol.message import Empty, Id, Message, Request, Secret, Size, Text

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


MAX_LENT_AT_ONCE = 64
"""Segments of one reply, as no message carries more descriptors."""


class MemorySocket(msgspec.Struct, frozen=True):
    """Where an agent of the same machine gets the memory of an engine, to map it.

    ``machine`` is the boot id of the kernel. ``closed`` says why there is none, and is empty
    otherwise.
    """

    path: Text = ""
    machine: Text = ""
    closed: Text = ""


class LentSegment(msgspec.Struct, frozen=True):
    """One segment of a rank, and the size of its file."""

    rank: Size
    segment_id: Id
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class MemoryLent(Message, frozen=True):
    """Reply to `LendMemory`: some of the ``num_segments``, a descriptor with each, in order.

    ``agent_boot`` is that of who answers: at the same path may be another agent, in another mount
    namespace.
    """

    agent_boot: Id
    num_segments: Size
    segments: Annotated[tuple[LentSegment, ...], msgspec.Meta(max_length=MAX_LENT_AT_ONCE)]


class LendMemory(Request[MemoryLent], frozen=True):
    """Asks for the segments of the ranks of one handshake from number ``first`` on, read-only.

    The connection stays open while they are mapped: its end means that the engine is gone.
    """

    op: ClassVar[str] = "lend"

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    access: Secret
    first: Size = 0


MEMORY_REQUESTS: tuple[type[Request[Any]], ...] = (LendMemory,)
