"""The memory of a local engine as its agent holds it: mapped, registered, and given back.

Addresses are kept while a transfer may still touch them; the bytes go at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio

from kvbus.agent.loop import in_thread
from kvbus.agent.slots import HOST, StagingDevices, cuda
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError, SegmentError
from kvbus.geometry import EngineSpec, GroupSpec, RankSpec
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.copying import PagedMemory
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.run_copy import swap_word
from kvbus.planning import PlacedRank
from kvbus.protocol.attach import PassCuda, PassSegment, SegmentPassed
from kvbus.protocol.message import Empty
from kvbus.protocol.word import WORDS_BYTES
from kvbus.transport import Registration, Transport

if TYPE_CHECKING:
    from kvbus.memory.cuda import CopyStream, CudaMapping

MAX_PROCESS_SEGMENTS = 4096
"""Most segments of memory on one attach connection."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class RankMemory:
    """One rank: its spec, and its segments, mapped; registered with NIXL or not.

    ``device`` is where all of it is, and so the slots that it is copied to and from. On a GPU,
    copies run on ``stream``. ``words`` are for offers of the engine, if this process has them.
    """

    rank: RankSpec
    mappings: Mapping[str, SegmentMapping | CudaMapping]
    registrations: tuple[Registration, ...]
    device: str = HOST
    stream: CopyStream | None = None
    words: SegmentMapping | None = None
    num_blocks: dict[str, int] = field(init=False)
    """Blocks that this rank's cache has, by group."""
    _paged: dict[str, PagedMemory] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.num_blocks = self.rank.num_blocks

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

    def paged(self, group: GroupSpec) -> PagedMemory:
        """One group of it, for copies; made once, as its plans are kept. Call it in a thread."""
        if group.name not in self._paged:
            buffers = {name: mapping.view() for name, mapping in self.mappings.items()}
            mover = None if self.stream is None else cuda().GpuMover([*buffers.values()])
            paged = PagedMemory(group, self.rank.regions, buffers, mover=mover)
            self._paged[group.name] = paged
        return self._paged[group.name]

    def forget_paged(self) -> None:
        """Hold on to no view of the memory: no copy runs any more, and none will."""
        self._paged.clear()

    def placed(self, engine: EngineSpec) -> PlacedRank:
        """The rank as the planner of READs wants it."""
        return PlacedRank(engine, self.rank, self.addresses)

    def mapped(self, engine: EngineSpec) -> PlacedRank:
        """The rank as the planner of copies in this process wants it."""
        return PlacedRank(engine, self.rank, self.mapped_addresses)


class Segments:
    """The segments that one engine process has passed, until it registers them or dies.

    ``direct`` is False when one of them stays unregistered: then NIXL is told of none. With
    ``lend`` they can be passed to other agents of this machine. ``on_cut`` is called in the event
    loop with the id of one that the process has truncated.
    """

    def __init__(
        self,
        transport: Transport,
        staging: StagingDevices,
        bus_errors: BusErrors,
        *,
        lend: bool,
        on_cut: Callable[[str], None],
    ) -> None:
        self.mappings: dict[str, SegmentMapping | CudaMapping] = {}
        self.direct, self.unmapped = True, False
        self.words: SegmentMapping | None = None
        self._transport, self._staging, self._bus_errors = transport, staging, bus_errors
        self._lend, self._on_cut = lend, on_cut
        self._registrations: dict[str, Registration] = {}
        self._device: str | None = None
        self._events: dict[bytes, None] = {}
        self._lock = anyio.Lock()  # of `register` and `unmap`: neither finds the other half done

    async def take(self, segment: PassSegment, fds: list[int]) -> SegmentPassed:
        """Map the one descriptor of ``fds``, in a thread, as reserving its pages can take long.

        Raises `ProtocolError`, `SegmentError`, `LocalError`, and `ConfigError` for unregistered
        memory where there are no slots.
        """
        if len(fds) != 1:
            raise ProtocolError(f"a segment comes with 1 descriptor, not {len(fds)}")
        if segment.words and segment.size_bytes != WORDS_BYTES:
            raise SegmentError(
                f"a page of words has {WORDS_BYTES} bytes, not {segment.size_bytes}",
                size_bytes=segment.size_bytes,
            )
        direct = segment.direct and not self._staging.only
        if not direct:
            self._staging.check_packs()
        self._check_new(segment.segment_id, HOST)
        opened = partial(
            SegmentMapping,
            fds.pop(),
            size_bytes=segment.size_bytes,
            lend=self._lend,
            words=segment.words,
        )
        mapping = await in_thread(opened)
        await self._keep(segment.segment_id, mapping, HOST)
        if segment.words and mapping.sealed and swap_word is not None:
            self.words = mapping
        self.direct &= direct
        if not mapping.sealed:
            in_loop = asyncio.get_running_loop().call_soon_threadsafe
            on_cut = partial(in_loop, self._on_cut, segment.segment_id)
            mapping.survive_cuts(self._bus_errors, on_cut)
        return SegmentPassed(sealed=mapping.sealed)

    async def take_cuda(self, segment: PassCuda) -> Empty:
        """Open memory of a GPU, in a thread, and have slots for that GPU.

        Raises `SegmentError`, `LocalError`, and `ConfigError` without slots.
        """
        self._check_new(segment.segment_id, segment.device)
        await self._staging.make(segment.device)

        def opened() -> CudaMapping:
            place = {"offset_bytes": segment.offset_bytes, "size_bytes": segment.size_bytes}
            mapping: CudaMapping = cuda().CudaMapping(segment.device, segment.handle, **place)
            return mapping

        await self._keep(segment.segment_id, await in_thread(opened), segment.device)
        self.direct = False
        if segment.event is not None:
            self._events[segment.event] = None
        return Empty()

    async def register(self, rank: RankSpec) -> RankMemory:
        """Register every segment of ``rank``, unless one stays unregistered.

        Raises `LocalError` when a segment was not passed.
        """
        async with self._lock:
            if self.unmapped:
                raise _ended()
            self._check_passed(rank)
            for name, mapping in list(self.mappings.items()):  # more may be passed meanwhile
                if not self.direct or not isinstance(mapping, SegmentMapping):
                    break
                if mapping is self.words:
                    continue
                if name not in self._registrations:
                    future = self._transport.register(mapping.address, mapping.size_bytes)
                    self._registrations[name] = await asyncio.wrap_future(future)
            return RankMemory(
                rank=rank,
                mappings=self.mappings,
                words=self.words,
                registrations=tuple(self._registrations.values()),
                device=self._device or HOST,
                stream=await self._copy_stream(),
            )

    def find_cuts(self) -> None:
        """Report a truncated segment, though nothing here has touched it yet."""
        for name, mapping in self.mappings.items():
            if isinstance(mapping, SegmentMapping) and mapping.was_cut():
                self._on_cut(name)
                return

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

    def registered(self) -> list[SegmentMapping]:
        """What holds the addresses that NIXL was told of; they go when it is collected."""
        mapped = (self.mappings[name] for name in self._registrations)
        return [mapping for mapping in mapped if isinstance(mapping, SegmentMapping)]

    async def unmap(self) -> None:
        """Deregister and give the addresses back; nothing may be in flight any more."""
        self.unmapped = True
        async with self._lock:
            for registration in self._registrations.values():
                await asyncio.wrap_future(self._transport.deregister(registration))
            self._registrations.clear()
            await in_thread(_unmap, list(self.mappings.values()))

    def _check_new(self, segment_id: str, device: str) -> None:
        """Raise a `KVBusError` for a segment that the process may not pass beside its others."""
        if len(self.mappings) >= MAX_PROCESS_SEGMENTS:
            raise SegmentError(
                f"this process has passed {MAX_PROCESS_SEGMENTS} segments, which is the limit: "
                "pass fewer and larger ones",
                code=ErrorCode.BUSY,
                limit=MAX_PROCESS_SEGMENTS,
            )
        if segment_id in self.mappings:
            raise LocalError(f"segment '{segment_id}' was passed already", segment_id=segment_id)
        if self._device not in (None, device):
            raise LocalError(
                f"segment '{segment_id}' is on {device}, those before it on {self._device}: a rank "
                "has all of its memory on one device",
                segment_id=segment_id,
            )

    async def _keep(
        self, segment_id: str, mapping: SegmentMapping | CudaMapping, device: str
    ) -> None:
        try:
            if self.unmapped:
                raise _ended()
            self._check_new(segment_id, device)  # another may have come meanwhile
        except KVBusError:
            await in_thread(mapping.close)
            raise
        self._device = device
        self.mappings[segment_id] = mapping

    async def _copy_stream(self) -> CopyStream | None:
        for mapping in self.mappings.values():
            if not isinstance(mapping, SegmentMapping):
                return await in_thread(self._open_stream, mapping.ordinal)
        return None

    def _open_stream(self, ordinal: int) -> CopyStream:
        stream: CopyStream = cuda().CopyStream(ordinal, tuple(self._events))
        return stream

    def _check_passed(self, rank: RankSpec) -> None:
        for segment in rank.segments:
            mapping = self.mappings.get(segment.segment_id)
            if mapping is None or mapping.size_bytes < segment.size_bytes:
                raise LocalError(
                    f"segment '{segment.segment_id}' of {segment.size_bytes} bytes was not passed",
                    segment_id=segment.segment_id,
                )


def _unmap(mappings: Iterable[SegmentMapping | CudaMapping]) -> None:
    """All of them; raises the first `KVBusError` then."""
    failures: list[KVBusError] = []
    for mapping in mappings:
        try:
            mapping.close()
        except KVBusError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _ended() -> LocalError:
    return LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
