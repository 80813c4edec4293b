"""Messages of the Unix sockets: an engine passes memory, a prefill agent lends it."""

from typing import Annotated

import msgspec

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import Name
from kvbus.protocol.message import (
    AgentBoot,
    AgentId,
    Empty,
    EngineId,
    Id,
    MaxProtocol,
    MemoryAccess,
    MemoryId,
    Message,
    MinProtocol,
    Protocol,
    Request,
    Size,
    Socket,
    Text,
    request,
)

CudaHandle = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
SegmentId = Id
"""Name of the segment, unique within the rank. Regions refer to it."""
SegmentBytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
MAX_LENT_AT_ONCE = 64
"""Segments of one reply, as no message carries more descriptors."""


class Welcome(Message, frozen=True):
    """Reply to `Hello`: what the agent is, and where its other sockets are."""

    protocol: Protocol
    agent_id: AgentId
    agent_boot: Id
    """Boot id of the agent's process."""
    role: AgentRole
    engine_endpoint: Id
    """ZeroMQ endpoint of the engine socket."""
    peer_endpoint: Id
    """ZeroMQ endpoint of the peer socket."""
    events_endpoint: Id
    """ZeroMQ endpoint of the events socket."""
    server_key: Text = ""
    """CURVE key of both, in Z85; empty without keys."""


@request(
    "hello",
    Socket.ATTACH,
    refusals="unsupported_version engine_conflict stale",
)
class Hello(Request[Welcome], frozen=True):
    """The first message on an attach connection: which engine this process belongs to."""

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    engine_id: Id
    """The engine, the same in all of its processes."""
    boot: Name
    """The boot id of this session: new for each attach connection."""


class SegmentPassed(Message, frozen=True):
    sealed: bool
    """Whether the kernel forbids to shrink the file."""


@request("segment", Socket.ATTACH, refusals="not_registered segment config")
class PassSegment(Request[SegmentPassed], frozen=True):
    """Passes one shared memory object, whose file descriptor comes with it. Where the agent has no
    staging slots, ``direct`` must be true (``config``).
    """

    segment_id: SegmentId
    size_bytes: SegmentBytes
    """Bytes of it, exactly those of the file."""
    direct: bool = True
    """Whether NIXL may register it. One segment with false makes the whole rank *unregistered*: its
    KV is copied by agents of this machine, or goes through staging slots."""
    words: bool = False
    """Whether it is the engine's [page of words](#words), and no memory of KV: 4,096 zeros, sealed
    against shrinking."""


@request("cuda", Socket.ATTACH, refusals="not_registered segment config")
class PassCuda(Request[Empty], frozen=True):
    """Passes memory of a GPU that this process allocated; see [CUDA memory](#cuda-memory)."""

    segment_id: SegmentId
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """UUID of the GPU, as ``nvidia-smi -L`` prints it: ``GPU-`` and 36 characters."""
    handle: CudaHandle
    """The allocation's ``CUipcMemHandle``, of ``cuIpcGetMemHandle`` or ``cudaIpcGetMemHandle``."""
    offset_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    """Where the segment begins in the allocation."""
    size_bytes: SegmentBytes
    """Bytes of the segment."""
    event: CudaHandle | None = None
    """The ``CUipcEventHandle`` of an event that the engine records; nil when it waits for its GPU.
    """


class MemorySocket(msgspec.Struct, frozen=True):
    """Where memory is lent; see [Memory socket](#memory-socket)."""

    path: Text = ""
    """Path of the Unix socket; empty when ``closed`` is not."""
    machine: Text = ""
    """Boot id of the agent's kernel (``/proc/sys/kernel/random/boot_id``)."""
    closed: Text = ""
    """Why the memory is not lent, for people; empty when it is."""


class LentSegment(msgspec.Struct, frozen=True):
    """One segment that was lent."""

    rank: Size
    """Number of the rank."""
    segment_id: SegmentId
    size_bytes: SegmentBytes
    """Size of its file, at least that of the rank's segment."""


class MemoryLent(Message, frozen=True):
    agent_boot: Id
    """Boot id of the agent. Take nothing from another, which may be at the path."""
    segments: Annotated[tuple[LentSegment, ...], msgspec.Meta(max_length=MAX_LENT_AT_ONCE)]
    """None behind the last one; the message's descriptors are theirs, in this order."""


@request("lend", Socket.MEMORY, refusals="forbidden stale engine_unknown engine_lost config")
class LendMemory(Request[MemoryLent], frozen=True):
    """Asks for descriptors of the segments of all ranks of a handshake. A connection is for one
    engine.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    access: MemoryAccess
    first: Size = 0
    """Number of the first segment that is wanted: how many you have."""
    grant: Text = ""
    """As in the reply to ``handshake``."""
    words: bool = False
    """Whether the [page of words](protocol-engine.md#words) is wanted, and no segment. Its
    descriptor comes alone; none comes when the engine has no page."""
