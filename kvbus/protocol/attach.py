"""Messages of the Unix sockets."""

from typing import Annotated, Literal

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
    MemoryId,
    Message,
    MinProtocol,
    Protocol,
    RankSecret,
    Request,
    Size,
    Socket,
    Text,
    request,
)

CudaHandle = Annotated[bytes, msgspec.Meta(max_length=64)]
SegmentId = Id
"""Name of the segment, unique within the rank. Regions refer to it."""
SegmentKind = Literal["kv", "cells", "sequence"]
SegmentBytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
MAX_LENT_AT_ONCE = 64
"""Segments in one reply: a message carries at most 64 descriptors."""
CudaParts = Annotated[tuple[SegmentBytes, ...], msgspec.Meta(max_length=MAX_LENT_AT_ONCE)]
GpuName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Welcome(Message, frozen=True):
    """Reply to `Hello`: the agent, and the endpoints of its other sockets."""

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
    """CURVE key of the peer and events sockets, in Z85; empty without keys."""


@request(
    "hello",
    Socket.ATTACH,
    refusals="unsupported_version engine_conflict stale",
)
class Hello(Request[Welcome], frozen=True):
    """Open an attach connection, and name the engine of this process. Send it first."""

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    engine_id: Id
    """Id of the engine, the same in all of its processes."""
    boot: Name
    """Boot id of this session, new for each attach connection."""


class SegmentPassed(Message, frozen=True):
    sealed: bool
    """Whether a seal prevents shrinking of the file."""


@request("segment", Socket.ATTACH, refusals="not_registered segment config")
class PassSegment(Request[SegmentPassed], frozen=True):
    """Pass one shared memory object. Its file descriptor comes with the message. At an agent
    without staging slots, ``direct`` must be true (else ``config``).
    """

    segment_id: SegmentId
    size_bytes: SegmentBytes
    """Size of the segment; equals the size of its file."""
    direct: bool = True
    """Whether NIXL may register the segment. One segment with false makes the whole rank
    *unregistered*: agents of this machine copy its KV, or it goes through staging slots."""
    kind: SegmentKind = "kv"
    """``kv`` for KV memory, ``cells`` for the engine's [page of cells](#commit-cells), ``sequence``
    for its [page of sequence words](#order-behind-gpu-work). A page has 4,096 zero bytes, sealed
    against shrinking."""


@request("cuda", Socket.ATTACH, refusals="not_registered segment config")
class PassCuda(Request[Empty], frozen=True):
    """Pass GPU memory that this process allocated; see [CUDA memory](#cuda-memory)."""

    segment_id: SegmentId
    device: GpuName
    """UUID of the GPU, as ``nvidia-smi -L`` prints it: ``GPU-`` or ``MIG-``, and 36 characters."""
    size_bytes: SegmentBytes
    """Size of the segment."""
    offset_bytes: Offset
    """Offset of the segment in the allocation, or in the first part."""
    handle: CudaHandle = b""
    """``CUipcMemHandle`` of the allocation, from ``cuIpcGetMemHandle`` or ``cudaIpcGetMemHandle``;
    empty for memory that is mapped in parts."""
    parts: CudaParts = ()
    """Sizes of the parts whose POSIX descriptors come with the message, in address order. Repeat
    the message for more of them, until they cover the segment."""


class MemorySocket(msgspec.Struct, frozen=True):
    """Address of a [memory socket](#memory-socket)."""

    path: Text = ""
    """Path of the Unix socket; empty if ``closed`` is set."""
    machine: Text = ""
    """Boot id of the agent's kernel (``/proc/sys/kernel/random/boot_id``)."""
    closed: Text = ""
    """Reason why the memory is not lent, for people; empty if it is lent."""


class LentCuda(msgspec.Struct, frozen=True):
    """GPU memory of a segment, as in [``cuda``](protocol-engine.md#cuda)."""

    device: GpuName
    """UUID of the GPU."""
    offset_bytes: Offset
    """Offset of the segment in the allocation, or in all parts."""
    handle: CudaHandle = b""
    """`CUipcMemHandle` of the allocation; empty for memory in parts."""
    part_bytes: Size = 0
    """Size of the part whose descriptor belongs to this entry; 0 with a ``handle``, which has no
    descriptor."""


class LentSegment(msgspec.Struct, frozen=True):
    """One segment that an agent lends."""

    rank: Size
    """Number of the rank."""
    segment_id: SegmentId
    size_bytes: SegmentBytes
    """Size of its file, at least the size of the rank's segment."""
    cuda: LentCuda | None = None
    """Set for GPU memory; several entries follow each other for a segment with several parts."""


class MemoryLent(Message, frozen=True):
    agent_boot: Id
    """Boot id of the agent. Reject any other: another agent may listen at this path."""
    segments: Annotated[tuple[LentSegment, ...], msgspec.Meta(max_length=MAX_LENT_AT_ONCE)]
    """Segments from ``first`` on; empty after the last one. The message's descriptors belong to
    them, in this order."""


@request("lend", Socket.MEMORY, refusals="forbidden stale engine_unknown engine_lost config")
class LendMemory(Request[MemoryLent], frozen=True):
    """Get descriptors of the segments of all ranks of a handshake. Use one connection for each
    engine.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    rank_secret: RankSecret
    first: Size = 0
    """Index of the first segment to send: the number of segments that you already have."""
    grant: Text = ""
    """As in the reply to ``handshake``."""
    cells: bool = False
    """Whether to send the [page of cells](protocol-engine.md#commit-cells) instead of segments. Its
    descriptor comes alone; an engine without a page has none."""
