"""The memory of a local engine as its agent holds it: mapped, registered, and given back.

Refuses to give addresses back while a transfer may still touch them; the bytes go at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from kvbus.agent.process.loop import in_thread
from kvbus.agent.staging.devices import HOST, StagingDevices
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.geometry import AxisName, EngineSpec, RankSpec
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.pages import Pages
from kvbus.planning import PlacedRank
from kvbus.protocol.attach import PassCuda, PassSegment
from kvbus.protocol.message import Empty
from kvbus.transport import Registration, Transport

if TYPE_CHECKING:
    from kvbus.memory.copy_stream import CopyStream
    from kvbus.memory.cuda_mapping import CudaMapping


@dataclass(slots=True, eq=False)
class RankMemory:
    """One rank: its spec, and its segments, mapped; registered with NIXL or not.

    ``device`` is where all of it is, and so the slots that it is copied to and from. On a GPU,
    copies run on ``stream``.
    """

    rank: RankSpec
    mappings: Mapping[str, SegmentMapping | CudaMapping]
    registrations: tuple[Registration, ...]
    device: str = HOST
    stream: CopyStream | None = None
    num_blocks: dict[str, int] = field(init=False)
    """Blocks that this rank's cache has, by group."""

    def __post_init__(self) -> None:
        self.num_blocks = {}
        for region in self.rank.regions:
            known = self.num_blocks.get(region.group)
            size = region.size(AxisName.BLOCK)
            self.num_blocks[region.group] = size if known is None else min(size, known)

    @property
    def direct(self) -> bool:
        """Whether NIXL reads and writes its blocks; else its KV goes through slots."""
        return bool(self.registrations)

    @property
    def addresses(self) -> dict[str, int]:
        """Where each registered segment begins in this process."""
        return self.mapped_addresses if self.direct else {}

    @property
    def mapped_addresses(self) -> dict[str, int]:
        """Where each segment begins in this process, registered or not; none on a GPU."""
        mapped = self.mappings.items()
        return {name: one.address for name, one in mapped if isinstance(one, SegmentMapping)}

    def placed(self, engine: EngineSpec) -> PlacedRank:
        """The rank as the planner of READs wants it."""
        return PlacedRank(engine, self.rank, self.addresses)

    def mapped(self, engine: EngineSpec) -> PlacedRank:
        """The rank as the planner of copies in this process wants it."""
        return PlacedRank(engine, self.rank, self.mapped_addresses)


@dataclass(slots=True, eq=False)
class Segments:
    """The segments that one engine process has passed, until it registers them or dies.

    ``direct`` is False when one of them stays unregistered: then NIXL is told of none.
    `register` and `unmap` hold the lock, so that neither finds the other half done.
    """

    mappings: dict[str, SegmentMapping | CudaMapping] = field(default_factory=dict)
    registrations: dict[str, Registration] = field(default_factory=dict)
    direct: bool = True
    unmapped: bool = False
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    _device: str | None = None
    _events: dict[bytes, None] = field(default_factory=dict)

    async def take(
        self, segment: PassSegment, fds: list[int], staging: StagingDevices, *, lend: bool
    ) -> SegmentMapping:
        """Map the one descriptor of ``fds``, in a thread, as reserving its pages can take long.

        Raises `ProtocolError`, `SegmentError`, `LocalError`, and `ConfigError` for unregistered
        memory where ``staging`` has no slots.
        """
        if len(fds) != 1:
            raise ProtocolError(f"a segment comes with 1 descriptor, not {len(fds)}")
        direct = segment.direct and not staging.only
        if not direct:
            staging.check_packs()
        self.check_new(segment.segment_id, HOST)
        fd, size_bytes = fds.pop(), segment.size_bytes
        mapping = await in_thread(lambda: SegmentMapping(fd, size_bytes=size_bytes, lend=lend))
        if self.unmapped:
            mapping.unmap()
            raise _ended()
        self._keep(segment.segment_id, mapping, HOST)
        self.direct &= direct
        return mapping

    async def take_cuda(self, segment: PassCuda, staging: StagingDevices) -> Empty:
        """Open memory of a GPU, in a thread, and have slots for that GPU.

        Raises `SegmentError`, `LocalError`, and `ConfigError` without slots.
        """
        self.check_new(segment.segment_id, segment.device)
        await staging.make(segment.device)
        self.check_new(segment.segment_id, segment.device)
        mapping = await in_thread(_open_cuda, segment)
        if self.unmapped:
            await in_thread(mapping.unmap)
            raise _ended()
        self._keep(segment.segment_id, mapping, segment.device)
        self.direct = False
        if segment.event is not None:
            self._events[segment.event] = None
        return Empty()

    async def register(self, rank: RankSpec, transport: Transport) -> RankMemory:
        """Register every segment of ``rank``, unless one stays unregistered.

        Raises `LocalError` when a segment was not passed.
        """
        async with self.lock:
            if self.unmapped:
                raise _ended()
            self._check_passed(rank)
            for name, mapping in list(self.mappings.items()):  # more may be passed meanwhile
                if not self.direct or not isinstance(mapping, SegmentMapping):
                    break
                if name not in self.registrations:
                    future = transport.register(mapping.address, mapping.size_bytes)
                    self.registrations[name] = await asyncio.wrap_future(future)
            registrations = tuple(self.registrations.values())
            device, stream = self._device or HOST, await self._copy_stream()
            return RankMemory(rank, self.mappings, registrations, device, stream)

    # An engine's memory goes in two steps, as a transfer may be under way when the engine dies:
    #
    #     discard   at once: the bytes go, the addresses stay (zeros); live READs hit those
    #     unmap     once no copy runs and no handle is live: deregistered, then the addresses go
    #
    # `take` and `register` wait in threads, so either may find `unmapped` set when it comes back:
    # what it made is given back there, as nobody else knows of it.
    def discard(self) -> None:
        """Give the bytes back to the machine now; the addresses stay, as private zeros.

        Those of a GPU have to wait for `unmap`. In a thread: it takes long for a large cache.
        """
        for mapping in list(self.mappings.values()):
            mapping.discard()

    def registered_pages(self) -> list[Pages]:
        """What holds the addresses that NIXL was told of; they go when it is collected."""
        mapped = (self.mappings[name] for name in self.registrations)
        return [mapping.pages for mapping in mapped if isinstance(mapping, SegmentMapping)]

    async def unmap(self, transport: Transport) -> None:
        """Deregister and give the addresses back; nothing may be in flight any more."""
        self.unmapped = True
        async with self.lock:
            for registration in self.registrations.values():
                await asyncio.wrap_future(transport.deregister(registration))
            self.registrations.clear()
            failures = [error for one in self.mappings.values() if (error := await _unmap(one))]
            if failures:
                raise failures[0]

    def check_new(self, segment_id: str, device: str) -> None:
        """Raise `LocalError` for a segment that was passed, or is on another device than those."""
        if segment_id in self.mappings:
            raise LocalError(f"segment '{segment_id}' was passed already", segment_id=segment_id)
        if self._device not in (None, device):
            raise LocalError(
                f"segment '{segment_id}' is on {device}, those before it on {self._device}: a rank "
                "has all of its memory on one device",
                segment_id=segment_id,
            )

    def _keep(self, segment_id: str, mapping: SegmentMapping | CudaMapping, device: str) -> None:
        self._device = device
        self.mappings[segment_id] = mapping

    async def _copy_stream(self) -> CopyStream | None:
        gpus = [
            one.ordinal for one in self.mappings.values() if not isinstance(one, SegmentMapping)
        ]
        if not gpus:
            return None
        return await in_thread(_open_stream, gpus[0], tuple(self._events))

    def _check_passed(self, rank: RankSpec) -> None:
        for segment in rank.segments:
            mapping = self.mappings.get(segment.segment_id)
            if mapping is None or mapping.size_bytes < segment.size_bytes:
                raise LocalError(
                    f"segment '{segment.segment_id}' of {segment.size_bytes} bytes was not passed",
                    segment_id=segment.segment_id,
                )


async def _unmap(mapping: SegmentMapping | CudaMapping) -> KVBusError | None:
    """Why it could not be given back; None when it was."""
    try:
        if isinstance(mapping, SegmentMapping):
            mapping.unmap()
        else:
            await in_thread(mapping.unmap)
    except KVBusError as error:
        return error
    return None


def _open_cuda(segment: PassCuda) -> CudaMapping:
    from kvbus.memory.cuda_mapping import CudaMapping  # noqa: PLC0415  # imports torch: seconds

    return CudaMapping(
        segment.device,
        segment.handle,
        offset_bytes=segment.offset_bytes,
        size_bytes=segment.size_bytes,
    )


def _open_stream(ordinal: int, events: tuple[bytes, ...]) -> CopyStream:
    from kvbus.memory.copy_stream import CopyStream  # noqa: PLC0415  # imports torch: seconds

    return CopyStream(ordinal, events)


def _ended() -> LocalError:
    return LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
