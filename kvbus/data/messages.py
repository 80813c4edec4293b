"""Messages between the control process of an agent and its data process.

Each request gets exactly one `DataReply`: a definition when it holds, a job after all of its I/O
has ended. Requests are handled in order. If a definition fails, each job that names it fails with
the same error.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from kvbus import errors
from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable, EngineSpec, RankSpec, Tile
from kvbus.memory.gpu_source import GpuSource
from kvbus.planning import Share

HOST = "host"
"""Device of memory outside GPUs. GPUs are named by UUID."""
MemoryKind = Literal["DRAM", "VRAM"]
Backends = Mapping[str, Mapping[str, str]]
UCX = "UCX"
UCX_ONLY: Backends = {UCX: {}}
Span = tuple[int, int]
"""Token positions [start, stop)."""
Tables = Mapping[str, BlockTable]
Spans = Mapping[str, Span]


class DataRequest(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    id: int = 0


class Configure(DataRequest, frozen=True):
    """``nixl_backends`` has the parameters by backend, in order of preference."""

    nixl_name: str
    slice_bytes: int
    copy_threads: int
    nixl_backends: Backends = msgspec.field(default_factory=lambda: UCX_ONLY)


class CheckBackends(DataRequest, frozen=True):
    """Load the plugins of the backends. No port opens."""


class OpenNixl(DataRequest, frozen=True):
    """Create the NIXL agent, once, and register all ``direct`` memory."""


class OpenSlots(DataRequest, frozen=True):
    """Reply: `SlotsOpened`.

    Slots for a GPU are in its memory if ``nic_reads_gpu``, else in pinned host memory, with the
    other as fallback.
    """

    device: str
    num_slots: int
    slot_bytes: int
    nic_reads_gpu: bool = False


class SegmentPart(msgspec.Struct, frozen=True, array_like=True):
    """Host memory comes as a descriptor of the message; so does each part of GPU memory."""

    segment_id: str
    size_bytes: int
    cuda: GpuSource | None = None


class AddMemory(DataRequest, frozen=True):
    """Reply: `MemoryAdded`.

    ``borrowed`` memory is mapped read-only. ``direct`` memory is registered with NIXL. GPU memory
    is for copies by the GPUs of ``readers``, by default its own. Host memory with ``readers`` is
    pinned, and the first of them copies into it.
    """

    memory: int
    engine: EngineSpec
    rank: RankSpec
    segments: tuple[SegmentPart, ...]
    direct: bool
    borrowed: bool = False
    readers: tuple[str, ...] = ()


class AddRemote(DataRequest, frozen=True):
    """Without ``addresses`` its blocks are not registered at the peer."""

    memory: int
    peer: str
    engine: EngineSpec
    rank: RankSpec
    addresses: dict[str, int]


class DiscardMemory(DataRequest, frozen=True):
    """Zero the bytes of a memory, at the same addresses. Jobs may be in flight."""

    memory: int


class RemoveMemory(DataRequest, frozen=True):
    """No job may name the memory."""

    memory: int


class AddPeer(DataRequest, frozen=True):
    """Also for later registrations of a known peer."""

    peer: str
    metadata: tuple[bytes, ...]


class RemovePeer(DataRequest, frozen=True):
    """Remove a peer, once no READ from it is in flight. Later requests for it wait."""

    peer: str


class AddPlan(DataRequest, frozen=True):
    """``sources`` and ``targets`` map a rank number to a memory.

    ``slot_bytes`` above 0 makes staged plans instead of a `RunPlan`.
    """

    plan: int
    sources: dict[int, int]
    targets: dict[int, int]
    shares: tuple[Share, ...]
    groups: tuple[str, ...]
    slot_bytes: int = 0


class RemovePlan(DataRequest, frozen=True):
    plan: int


class Metadata(DataRequest, frozen=True):
    memories: tuple[int, ...]
    devices: tuple[str, ...]
    backend: str = UCX


class DriveProgress(DataRequest, frozen=True):
    on: bool


class Barrier(DataRequest, frozen=True):
    """Reply at once."""


class ListListening(DataRequest, frozen=True):
    """Reply: `Listening`."""


class AbortJob(DataRequest, frozen=True):
    job: int


class Turn(msgspec.Struct, frozen=True, array_like=True):
    owner: str
    priority: int = 0


class Read(DataRequest, frozen=True):
    plan: int
    source_tables: Tables
    target_tables: Tables
    spans: Spans
    priority: int = 0


class ReadStaged(DataRequest, frozen=True):
    plan: int
    index: int
    source_tables: Tables
    tile: Span
    device: str
    slot: int
    priority: int = 0


class ReadTile(DataRequest, frozen=True):
    peer: str
    address: int
    num_bytes: int
    memory_kind: MemoryKind
    remote_device: int
    device: str
    slot: int
    priority: int = 0


class Copy(DataRequest, frozen=True):
    """Fails if a source was truncated or discarded before the end."""

    plan: int
    source_tables: Tables
    target_tables: Tables
    spans: Spans
    turn: Turn


class CopyStaged(DataRequest, frozen=True):
    plan: int
    index: int
    target_tables: Tables
    tile: Span
    device: str
    slot: int
    turn: Turn


class Scatter(DataRequest, frozen=True):
    memories: tuple[int, ...]
    table: BlockTable
    tile: Tile
    device: str
    slot: int
    turn: Turn


class GatherJob(DataRequest, frozen=True):
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
    | CheckBackends
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
    address: int
    memory_kind: MemoryKind
    nixl_device: int
    gpu_bytes: int | None = None
    """Memory that the process has taken of the GPU: its context, and slots if they are there."""


class MemoryAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    addresses: dict[str, int]


class MetadataBlobs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    blobs: tuple[bytes, ...]


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    sockets: tuple[tuple[str, int], ...]


class Digested(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """64-bit XXH3, little-endian, in the order of `kvbus.planning.chosen_tiles`."""

    digests: bytes


Result = SlotsOpened | MemoryAdded | MetadataBlobs | Listening | Digested


class Failure(msgspec.Struct, frozen=True, array_like=True):
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
    """``undriven`` READs needed no progress by the peer."""

    to: int
    error: Failure | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    undriven: bool = False
    result: Result | None = None

    def failure(self) -> KVBusError | None:
        return None if self.error is None else self.error.error()


class Cut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The segment's bytes are zeros from now on."""

    memory: int
    segment_id: str


class Log(msgspec.Struct, frozen=True, array_like=True, tag=True):
    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float]


FromData = DataReply | Cut | Log
