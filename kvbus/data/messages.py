"""Messages between the control process of an agent and its data process.

Each request has an id and gets exactly one `DataReply`: a definition when it holds, a job after all
of its I/O has ended. The data process also sends notices.

    control process                       data process
      Configure, OpenSlots      ──▶
      AddMemory, AddPlan, ...   ──▶        maps, registers
      Read, Copy, Gather, ...   ──▶        jobs
      Abort                     ──▶        the job's reply follows
                                ◀──        Reply, Cut, Log

Requests are handled in order, so a job can directly follow its definitions. If a definition fails,
each job that names it fails with the same error.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from kvbus import errors
from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable, EngineSpec, RankSpec, Tile
from kvbus.planning import Share

HOST = "host"
"""Device of all memory outside GPUs. GPUs are named by UUID."""
MemoryKind = Literal["DRAM", "VRAM"]
Span = tuple[int, int]
"""Token positions [start, stop)."""
Tables = Mapping[str, BlockTable]
Spans = Mapping[str, Span]


class DataRequest(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    id: int = 0


class Configure(DataRequest, frozen=True):
    """First message. ``nixl_name`` is unique to this process."""

    nixl_name: str
    slice_bytes: int
    copy_threads: int


class OpenNixl(DataRequest, frozen=True):
    """Create the NIXL agent, once, and register all ``direct`` memory."""


class OpenSlots(DataRequest, frozen=True):
    """Allocate and register ``num_slots`` staging slots on a device. Reply: `SlotsOpened`.

    ``device`` is ``host`` or a GPU's UUID. Slots for a GPU are in its memory or in pinned host
    memory. ``nic_reads_gpu`` prefers the former; the other is the fallback.
    """

    device: str
    num_slots: int
    slot_bytes: int
    nic_reads_gpu: bool = False


class CudaPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of another process's CUDA allocation, by IPC handle."""

    device: str
    handle: bytes
    offset_bytes: int
    event: bytes | None


class SegmentPart(msgspec.Struct, frozen=True, array_like=True):
    """Segment of a rank: CUDA memory, or host memory by a descriptor of the message."""

    segment_id: str
    size_bytes: int
    cuda: CudaPart | None = None


class AddMemory(DataRequest, frozen=True):
    """Map one rank of an engine of this machine. Reply: `MemoryAdded`.

    Descriptors of host segments come with the message, in the order of ``segments``. ``borrowed``
    memory belongs to another agent and is mapped read-only. ``direct`` memory is registered with
    NIXL.
    """

    memory: int
    engine: EngineSpec
    rank: RankSpec
    segments: tuple[SegmentPart, ...]
    direct: bool
    borrowed: bool = False


class AddRemote(DataRequest, frozen=True):
    """Describe one rank at a peer. Without ``addresses`` its blocks are not registered there."""

    memory: int
    peer: str
    engine: EngineSpec
    rank: RankSpec
    addresses: dict[str, int]


class DiscardMemory(DataRequest, frozen=True):
    """Zero the bytes of a memory, at the same addresses. Jobs may be in flight."""

    memory: int


class RemoveMemory(DataRequest, frozen=True):
    """Deregister and unmap a memory that no job names."""

    memory: int


class AddPeer(DataRequest, frozen=True):
    """Add a peer, or later registrations of a known one, to NIXL."""

    peer: str
    metadata: tuple[bytes, ...]


class RemovePeer(DataRequest, frozen=True):
    """Remove a peer from NIXL, once no READ from it is in flight. Later requests for it wait."""

    peer: str


class AddPlan(DataRequest, frozen=True):
    """Make a plan; ``sources`` and ``targets`` map a rank number to a memory.

    With ``slot_bytes`` above 0 the result is a list of staged plans, otherwise one `RunPlan`. Only
    regions of ``groups`` are planned.
    """

    plan: int
    sources: dict[int, int]
    targets: dict[int, int]
    shares: tuple[Share, ...]
    groups: tuple[str, ...]
    slot_bytes: int = 0


class RemovePlan(DataRequest, frozen=True):
    """Drop a plan that no job names."""

    plan: int


class Metadata(DataRequest, frozen=True):
    """Request what peers need to read these memories and slots. Reply: `MetadataBlobs`."""

    memories: tuple[int, ...]
    devices: tuple[str, ...]


class DriveProgress(DataRequest, frozen=True):
    """Drive NIXL as the target of READs, until ``on`` is false."""

    on: bool


class Barrier(DataRequest, frozen=True):
    """Reply at once, after all earlier requests were read."""


class ListListening(DataRequest, frozen=True):
    """Request the TCP sockets at which this process listens. Reply: `Listening`."""


class AbortJob(DataRequest, frozen=True):
    """Start no further part of ``job``."""

    job: int


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Key under which a job waits for a thread. Jobs of one ``owner`` share one turn."""

    owner: str
    priority: int = 0


class Read(DataRequest, frozen=True):
    """READ from a peer straight into blocks, by a plan."""

    plan: int
    source_tables: Tables
    target_tables: Tables
    spans: Spans
    priority: int = 0


class ReadStaged(DataRequest, frozen=True):
    """READ positions ``tile`` of staged plan number ``index`` into a slot."""

    plan: int
    index: int
    source_tables: Tables
    tile: Span
    device: str
    slot: int
    priority: int = 0


class ReadTile(DataRequest, frozen=True):
    """READ a packed tile from a slot of a peer into a slot here."""

    peer: str
    address: int
    num_bytes: int
    memory_kind: MemoryKind
    remote_device: int
    device: str
    slot: int
    priority: int = 0


class Copy(DataRequest, frozen=True):
    """Copy between mapped memories, by a plan.

    Fails with ``transfer_failed`` if a source was truncated or discarded before the end.
    """

    plan: int
    source_tables: Tables
    target_tables: Tables
    spans: Spans
    turn: Turn


class CopyStaged(DataRequest, frozen=True):
    """Copy positions ``tile`` from a slot into blocks, by staged plan number ``index``."""

    plan: int
    index: int
    target_tables: Tables
    tile: Span
    device: str
    slot: int
    turn: Turn


class Scatter(DataRequest, frozen=True):
    """Copy a packed tile from a slot into the blocks of each memory."""

    memories: tuple[int, ...]
    table: BlockTable
    tile: Tile
    device: str
    slot: int
    turn: Turn


class GatherJob(DataRequest, frozen=True):
    """Copy a tile from blocks into a slot. The reply's ``seconds`` is the copy's duration."""

    memory: int
    table: BlockTable
    tile: Tile
    device: str
    slot: int
    turn: Turn


class Zero(DataRequest, frozen=True):
    memory: int
    group: str
    table: BlockTable
    span: Span
    turn: Turn


class Wipe(DataRequest, frozen=True):
    device: str
    slot: int


class DigestJob(DataRequest, frozen=True):
    """Digest about one in ``one_in`` pieces of a tile. Reply: `Digested`."""

    memory: int
    table: BlockTable
    tile: Tile
    offer_id: str
    one_in: int
    turn: Turn


Job = (
    Read | ReadStaged | ReadTile | Copy | CopyStaged | Scatter | GatherJob | Zero | Wipe | DigestJob
)
ToData = (
    Configure
    | OpenNixl
    | OpenSlots
    | AddMemory
    | AddRemote
    | DiscardMemory
    | RemoveMemory
    | AddPeer
    | RemovePeer
    | AddPlan
    | RemovePlan
    | Metadata
    | DriveProgress
    | Barrier
    | ListListening
    | AbortJob
    | Job
)


class SlotsOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Slots of one device: address of the first in the data process, and NIXL's device."""

    address: int
    memory_kind: MemoryKind
    nixl_device: int


class MemoryAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Address of each host segment in the data process."""

    addresses: dict[str, int]


class MetadataBlobs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One blob for each kind of memory."""

    blobs: tuple[bytes, ...]


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host and port of each listening TCP socket."""

    sockets: tuple[tuple[str, int], ...]


class Digested(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """XXH3 digests, 64 bits little-endian each, in the order of `kvbus.planning.chosen_tiles`."""

    digests: bytes


Result = SlotsOpened | MemoryAdded | MetadataBlobs | Listening | Digested


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Error of `kvbus.errors`, by the name of its class."""

    kind: str
    code: ErrorCode
    message: str
    detail: dict[str, str | int | float]

    @classmethod
    def of(cls, error: KVBusError) -> "Failure":
        return cls(type(error).__name__, error.code, error.message, error.detail)

    def error(self) -> KVBusError:
        kind = getattr(errors, self.kind, KVBusError)
        made: KVBusError = kind(self.message, code=self.code, **self.detail)
        return made


class DataReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to request ``to``.

    ``num_bytes`` were moved, even by a failed job. ``undriven`` marks READs that needed no progress
    by the peer.
    """

    to: int
    error: Failure | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    undriven: bool = False
    result: Result | None = None

    def failure(self) -> KVBusError | None:
        return None if self.error is None else self.error.error()


class Cut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Notice that a segment's owner has truncated it. Its bytes are zeros from now on."""

    memory: int
    segment_id: str


class Log(msgspec.Struct, frozen=True, array_like=True, tag=True):
    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float]


FromData = DataReply | Cut | Log
