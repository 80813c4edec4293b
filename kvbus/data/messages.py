"""Messages between the control process of an agent and its data process.

The control process sends requests. Each has an id and gets exactly one `Reply`: a definition when
it holds, a job when nothing of it is in flight any more. The data process also sends notices.

    control process                       data process
      Configure, OpenSlots      ──▶
      AddMemory, AddPlan, ...   ──▶        maps, registers
      Read, Copy, Gather, ...   ──▶        jobs
      Abort                     ──▶        the job's reply follows
                                ◀──        Reply, Cut, Log

Requests are handled in order, so a job may follow the definitions that it names at once. When a
definition fails, each job that names it fails with the same error.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from kvbus import errors
from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable, Box, EngineSpec, RankSpec
from kvbus.planning import Share

HOST = "host"
"""The device of all memory that is not a GPU's; GPUs are named by their UUIDs."""
MemoryKind = Literal["DRAM", "VRAM"]
Span = tuple[int, int]
"""Token positions [start, stop)."""
Tables = Mapping[str, BlockTable]
Spans = Mapping[str, Span]


class Request(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """A message to the data process; ``id`` names its reply."""

    id: int = 0


class Configure(Request, frozen=True):
    """The first message. ``nixl_name`` is the name of the NIXL agent, unique to this process."""

    nixl_name: str
    slice_bytes: int
    copy_threads: int


class OpenNixl(Request, frozen=True):
    """Create the NIXL agent, if there is none, and register all memory that is ``direct``."""


class OpenSlots(Request, frozen=True):
    """Allocate and register ``num_slots`` staging slots on a device; replied with `SlotsOpened`.

    ``device`` is ``host`` or the UUID of a GPU. With ``nic_reads_gpu`` slots for a GPU are placed
    in its memory if NIXL can register that, else in pinned host memory; without, the other way.
    """

    device: str
    num_slots: int
    slot_bytes: int
    nic_reads_gpu: bool = False


class CudaPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a CUDA allocation of another process. ``handle`` is its IPC handle."""

    device: str
    handle: bytes
    offset_bytes: int
    event: bytes | None


class SegmentPart(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a rank: host memory, whose descriptor comes with the message, or CUDA memory."""

    segment_id: str
    size_bytes: int
    cuda: CudaPart | None = None


class AddMemory(Request, frozen=True):
    """Map one rank of an engine of this machine; replied with `MemoryAdded`.

    The descriptors of its host segments come with the message, in the order of ``segments``.
    ``borrowed`` memory is another agent's: it is mapped read-only. ``direct`` memory is registered
    with NIXL.
    """

    memory: int
    engine: EngineSpec
    rank: RankSpec
    segments: tuple[SegmentPart, ...]
    direct: bool
    borrowed: bool = False


class AddRemote(Request, frozen=True):
    """Describe one rank at a peer. Without ``addresses`` its blocks are not registered there."""

    memory: int
    peer: str
    engine: EngineSpec
    rank: RankSpec
    addresses: dict[str, int]


class DiscardMemory(Request, frozen=True):
    """Replace the bytes of a memory by zeros, at the same addresses. Jobs may be in flight."""

    memory: int


class RemoveMemory(Request, frozen=True):
    """Deregister and unmap a memory. No job may name it any more."""

    memory: int


class AddPeer(Request, frozen=True):
    """Add a peer to NIXL, or later registrations of a known one. ``metadata`` names the peer."""

    peer: str
    metadata: tuple[bytes, ...]


class RemovePeer(Request, frozen=True):
    """Remove a peer from NIXL, once no READ from it is in flight.

    Requests that name the peer and come later wait for that.
    """

    peer: str


class AddPlan(Request, frozen=True):
    """Make a plan from source ranks to target ranks; both map a rank number to a memory.

    With ``slot_bytes`` above 0 it is a list of staged plans, else one `RunPlan`. Only regions of
    ``groups`` are planned.
    """

    plan: int
    sources: dict[int, int]
    targets: dict[int, int]
    shares: tuple[Share, ...]
    groups: tuple[str, ...]
    slot_bytes: int = 0


class RemovePlan(Request, frozen=True):
    """Drop a plan. No job may name it any more."""

    plan: int


class Metadata(Request, frozen=True):
    """Reply with `MetadataBlobs`: what peers need to read these memories and slots."""

    memories: tuple[int, ...]
    devices: tuple[str, ...]


class DriveProgress(Request, frozen=True):
    """Drive NIXL as the target of READs, until this comes with ``on`` false."""

    on: bool


class Ping(Request, frozen=True):
    """Reply at once."""


class ListListening(Request, frozen=True):
    """Reply with `Listening`: the TCP sockets at which this process listens."""


class Abort(Request, frozen=True):
    """Start no further part of ``job``; its reply follows when nothing of it is in flight."""

    job: int


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What a job waits for a thread under; jobs of one ``owner`` share one turn."""

    owner: str
    priority: int = 0


class Read(Request, frozen=True):
    """READ from a peer straight into blocks, by a plan."""

    plan: int
    source_tables: Tables
    target_tables: Tables
    spans: Spans
    priority: int = 0


class ReadStaged(Request, frozen=True):
    """READ positions ``box`` of staged plan number ``index`` into a slot."""

    plan: int
    index: int
    source_tables: Tables
    box: Span
    device: str
    slot: int
    priority: int = 0


class ReadBox(Request, frozen=True):
    """READ a packed box from a slot of a peer into a slot here."""

    peer: str
    address: int
    num_bytes: int
    memory_kind: MemoryKind
    remote_device: int
    device: str
    slot: int
    priority: int = 0


class Copy(Request, frozen=True):
    """Copy between mapped memories, by a plan.

    Fails with ``transfer_failed`` when a source was truncated or discarded before the end.
    """

    plan: int
    source_tables: Tables
    target_tables: Tables
    spans: Spans
    turn: Turn


class CopyStaged(Request, frozen=True):
    """Copy positions ``box`` from a slot into blocks, by staged plan number ``index``."""

    plan: int
    index: int
    target_tables: Tables
    box: Span
    device: str
    slot: int
    turn: Turn


class Scatter(Request, frozen=True):
    """Copy a packed box from a slot into the blocks of each of ``memories``."""

    memories: tuple[int, ...]
    table: BlockTable
    box: Box
    device: str
    slot: int
    turn: Turn


class Gather(Request, frozen=True):
    """Copy a box from blocks into a slot. The reply's ``seconds`` is the time of the copy."""

    memory: int
    table: BlockTable
    box: Box
    device: str
    slot: int
    turn: Turn


class Zero(Request, frozen=True):
    """Write zeros over positions of one group."""

    memory: int
    group: str
    table: BlockTable
    span: Span
    turn: Turn


class Wipe(Request, frozen=True):
    """Write zeros over a slot."""

    device: str
    slot: int


class Digest(Request, frozen=True):
    """Digest pieces of a box, about one in ``one_in``; replied with `Digested`."""

    memory: int
    table: BlockTable
    box: Box
    offer_id: str
    one_in: int
    turn: Turn


Job = Read | ReadStaged | ReadBox | Copy | CopyStaged | Scatter | Gather | Zero | Wipe | Digest
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
    | Ping
    | ListListening
    | Abort
    | Job
)


class SlotsOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Slots of one device: address of the first in the data process, and how NIXL knows them."""

    address: int
    memory_kind: MemoryKind
    nixl_device: int


class MemoryAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where each host segment begins in the data process; empty for CUDA memory."""

    addresses: dict[str, int]


class MetadataBlobs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One blob for each kind of memory."""

    blobs: tuple[bytes, ...]


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host and port of each TCP socket at which the data process listens."""

    sockets: tuple[tuple[str, int], ...]


class Digested(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """XXH3 digests, 64 bits little-endian each, in the order of `kvbus.planning.chosen_boxes`."""

    digests: bytes


Result = SlotsOpened | MemoryAdded | MetadataBlobs | Listening | Digested


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error of `kvbus.errors`, by the name of its class."""

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


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The one reply to request ``to``.

    ``num_bytes`` were moved, also by a job that failed. ``undriven`` says of READs that the peer
    had to drive nothing for them.
    """

    to: int
    error: Failure | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    undriven: bool = False
    result: Result | None = None

    def failure(self) -> KVBusError | None:
        """Return the error, if there is one."""
        return None if self.error is None else self.error.error()


class Cut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The owner of a segment has truncated it: its bytes are zeros from now on."""

    memory: int
    segment_id: str


class Log(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A line for the agent's log."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float]


FromData = Reply | Cut | Log
