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
    ServerKey,
    Size,
    Socket,
    Text,
    request,
)

CudaHandle = Annotated[bytes, msgspec.Meta(max_length=64)]
SegmentId = Id
"""Unique within the rank."""
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
    role: AgentRole
    engine_endpoint: Id
    peer_endpoint: Id
    events_endpoint: Id
    server_key: ServerKey = ""


@request(
    "hello",
    Socket.ATTACH,
    refusals="unsupported_version engine_conflict stale",
)
class Hello(Request[Welcome], frozen=True):
    """Open an attach connection. Send it first."""

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    engine_id: Id
    """The same in all processes of the engine."""
    boot: Name
    """New for each attach connection."""


class SegmentPassed(Message, frozen=True):
    sealed: bool
    """A seal prevents shrinking of the file."""


@request("segment", Socket.ATTACH, refusals="not_registered segment config")
class PassSegment(Request[SegmentPassed], frozen=True):
    """Pass one shared memory object; its file descriptor comes with the message."""

    segment_id: SegmentId
    size_bytes: SegmentBytes
    """The size of the file."""
    direct: bool = True
    """If false, the whole rank is *unregistered*: NIXL may not register it, and its KV is copied on
    this machine, or goes through staging slots (without these: ``config``)."""
    kind: SegmentKind = "kv"
    """``cells`` and ``sequence`` are pages of 4,096 zero bytes, sealed against shrinking, for
    [cells](#commit-cells) and [GPU work](#order-behind-gpu-work)."""


@request("cuda", Socket.ATTACH, refusals="not_registered segment config")
class PassCuda(Request[Empty], frozen=True):
    """Pass GPU memory that this process allocated; see [CUDA memory](#cuda-memory)."""

    segment_id: SegmentId
    device: GpuName
    """UUID of the GPU, as ``nvidia-smi -L`` prints it."""
    size_bytes: SegmentBytes
    offset_bytes: Offset
    """In the allocation, or in the first part."""
    handle: CudaHandle = b""
    """``CUipcMemHandle`` of the allocation, from ``cuIpcGetMemHandle``; empty for memory that is
    mapped in parts."""
    parts: CudaParts = ()
    """Sizes of the parts whose descriptors come with the message, in address order. Repeat the
    message until they cover the segment."""


class MemorySocket(msgspec.Struct, frozen=True):
    """Address of a [memory socket](#memory-socket)."""

    path: Text = ""
    """Empty if ``closed`` is set."""
    machine: Text = ""
    """Boot id of the agent's kernel (``/proc/sys/kernel/random/boot_id``)."""
    closed: Text = ""
    """Reason why the memory is not lent."""


class LentCuda(msgspec.Struct, frozen=True):
    """GPU memory, as in [``cuda``](#cuda)."""

    device: GpuName
    offset_bytes: Offset
    """In the allocation, or in all parts."""
    handle: CudaHandle = b""
    part_bytes: Size = 0
    """Size of this entry's part; 0 with a ``handle``."""


class LentSegment(msgspec.Struct, frozen=True):
    """One segment that an agent lends."""

    rank: Size
    segment_id: SegmentId
    size_bytes: SegmentBytes
    """File size: at least that of the rank's segment."""
    cuda: LentCuda | None = None
    """GPU memory; one entry for each part."""


class MemoryLent(Message, frozen=True):
    agent_boot: Id
    """Reject any other: another agent may listen at this path."""
    segments: Annotated[tuple[LentSegment, ...], msgspec.Meta(max_length=MAX_LENT_AT_ONCE)]
    """From ``first`` on; empty after the last one. The descriptors are in this order."""


@request("lend", Socket.MEMORY, refusals="forbidden stale engine_unknown engine_lost config")
class LendMemory(Request[MemoryLent], frozen=True):
    """Get descriptors of the segments of all ranks of a handshake."""

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    rank_secret: RankSecret
    first: Size = 0
    """Number of segments that you have."""
    grant: Text = ""
    """From the reply to ``handshake``."""
    cells: bool = False
    """Send the [page of cells](#commit-cells) instead, if the engine has one."""
