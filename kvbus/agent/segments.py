"""The memory of a local engine: descriptors here, mappings in the data process.

A dead engine's bytes are freed immediately; its addresses stay while transfers use them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvbus.agent.loop import in_thread
from kvbus.agent.staging_devices import StagingDevices
from kvbus.data import messages as wire
from kvbus.data.client import DataProcess, Defined
from kvbus.data.messages import HOST
from kvbus.errors import (
    ErrorCode,
    KVBusError,
    LocalError,
    ProtocolError,
    SegmentError,
    TransferFailed,
)
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.gpu_source import GpuSource, PassedGpuMemory
from kvbus.memory.mapping import (
    CellsPage,
    MappedFile,
    PassedFile,
    SequencePage,
    check_descriptors,
    do_all,
)
from kvbus.memory.run_copy import swap_word
from kvbus.planning import PlacedRank
from kvbus.protocol.attach import PassCuda, PassSegment, SegmentKind, SegmentPassed
from kvbus.protocol.commit_cell import CELLS_BYTES
from kvbus.protocol.engine import SEQUENCE_BYTES
from kvbus.protocol.message import Empty

MAX_PROCESS_SEGMENTS = 4096
PAGES = {"cells": CELLS_BYTES, "sequence": SEQUENCE_BYTES}

Passed = PassedFile | PassedGpuMemory


@dataclass(slots=True, eq=False, weakref_slot=True)
class RegisteredRank:
    engine: EngineSpec
    rank: RankSpec
    number: int
    defined: Defined
    device: str
    direct: bool
    cells: CellsPage | None
    sequence: SequencePage | None
    segments: Segments
    num_blocks: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_blocks = self.rank.num_blocks

    @property
    def addresses(self) -> dict[str, int]:
        added = self.defined.result
        return added.addresses if self.direct and isinstance(added, wire.MemoryAdded) else {}

    @property
    def mapped_addresses(self) -> dict[str, int]:
        return self.segments.map_here(segment.segment_id for segment in self.rank.segments)

    def mapped(self) -> PlacedRank:
        return PlacedRank(self.engine, self.rank, self.mapped_addresses)


class Segments:
    """If one is not ``direct``, none is registered with NIXL. ``on_cut`` runs in the event loop."""

    def __init__(
        self,
        data: DataProcess,
        staging: StagingDevices,
        bus_errors: BusErrors,
        *,
        on_cut: Callable[[str], None],
    ) -> None:
        self.passed: dict[str, Passed] = {}
        self.direct = True
        self.cells: CellsPage | None = None
        self.sequence: SequencePage | None = None
        self._data, self._staging, self._bus_errors = data, staging, bus_errors
        self._on_cut, self._loop = on_cut, asyncio.get_running_loop()
        self._device: str | None = None
        self._memories: list[RegisteredRank] = []
        self._mapped: dict[str, MappedFile] = {}
        self._is_discarded = False

    async def take(self, segment: PassSegment, fds: list[int]) -> SegmentPassed:
        """Check the descriptor, in a thread: reserving its pages can take long."""
        if len(fds) != 1:
            raise ProtocolError(f"a segment comes with 1 descriptor, not {len(fds)}")
        page_bytes = PAGES.get(segment.kind, segment.size_bytes)
        if segment.size_bytes != page_bytes:
            raise SegmentError(
                f"a page of {segment.kind} has {page_bytes} bytes, not {segment.size_bytes}",
                size_bytes=segment.size_bytes,
            )
        is_page = segment.kind in PAGES
        direct = is_page or (segment.direct and not self._staging.only)
        if not direct:
            self._staging.check_packs()
        device = None if is_page else HOST
        self._check_new(segment.segment_id, device)
        passed = await in_thread(partial(PassedFile, fds.pop(), size_bytes=segment.size_bytes))
        try:
            self._check_new(segment.segment_id, device)  # another may have come meanwhile
            if is_page:
                self._map_page(segment.kind, passed)
        except (KVBusError, OSError):
            await in_thread(passed.close)
            raise
        self._device = device or self._device
        self.passed[segment.segment_id] = passed
        self.direct &= direct
        return SegmentPassed(sealed=passed.sealed)

    def _map_page(self, kind: SegmentKind, passed: PassedFile) -> None:
        if kind == "sequence":
            if not passed.sealed:
                raise SegmentError("a page of sequence words must be sealed against shrinking")
            self.sequence = SequencePage(passed)
        elif passed.sealed and swap_word is not None:
            self.cells = CellsPage(passed)

    async def take_cuda(self, segment: PassCuda, fds: list[int]) -> Empty:
        if self._is_discarded:
            raise _ended()
        if len(fds) != len(segment.parts):
            raise ProtocolError(f"{len(segment.parts)} parts came with {len(fds)} descriptors")
        if fds:
            check_descriptors(max(fds), segment.size_bytes)
            self._check_room(f"'{segment.segment_id}'", self._num_parts + len(fds))
        source = GpuSource(segment.device, segment.offset_bytes, segment.handle, segment.parts)
        source.check_kind()
        known = self.passed.get(segment.segment_id)
        if isinstance(known, PassedGpuMemory) and segment.parts:
            known.add(source, segment.size_bytes, fds)
            fds.clear()  # they are the segment's
            return Empty()
        self._check_new(segment.segment_id, segment.device)
        await self._staging.make(segment.device)
        self._check_new(segment.segment_id, segment.device)  # another may have come meanwhile
        self._device, self.direct = segment.device, False
        self.passed[segment.segment_id] = PassedGpuMemory(source, segment.size_bytes, fds)
        fds.clear()
        return Empty()

    async def register(
        self, engine: EngineSpec, rank: RankSpec, *, readers: tuple[str, ...] = ()
    ) -> RegisteredRank:
        """Have the data process map a rank; GPUs of ``readers`` copy into its host memory."""
        if self._is_discarded:
            raise _ended()
        self._check_passed(rank)
        number = self._data.new_number()
        names = [segment.segment_id for segment in rank.segments]
        add = wire.AddMemory(
            memory=number,
            engine=engine,
            rank=rank,
            segments=tuple(_part(name, self.passed[name]) for name in names),
            direct=self.direct,
            readers=readers,
        )
        remove, fds = wire.RemoveMemory(memory=number), self.fds_of(names)
        defined = Defined(add, remove, fds=fds)
        memory = RegisteredRank(
            engine=engine,
            rank=rank,
            number=number,
            defined=defined,
            device=self._device or HOST,
            direct=self.direct,
            cells=self.cells,
            sequence=self.sequence,
            segments=self,
        )
        self._memories.append(memory)
        await self._data.define(defined)
        return memory

    def fds_of(self, names: Iterable[str]) -> list[int]:
        fds: list[int] = []
        for passed in (self.passed[name] for name in names):
            fds += [passed.fd] if isinstance(passed, PassedFile) else passed.fds
        return fds

    async def check(self) -> None:
        """Raise the error of a restarted data process that cannot map the memory."""
        for memory in self._memories:
            if not (self._is_discarded or memory.defined.is_removed):
                with suppress(TransferFailed):  # it has ended; its successor will be checked
                    await self._data.result(memory.defined)

    def has(self, number: int) -> bool:
        return any(memory.number == number for memory in self._memories)

    def find_cuts(self) -> None:
        for name, passed in self.passed.items():
            if isinstance(passed, PassedFile) and passed.was_cut():
                self._on_cut(name)
                return

    def map_here(self, names: Iterable[str]) -> dict[str, int]:
        """Return addresses; none for GPU memory, or if the kernel refuses."""
        found: dict[str, int] = {}
        for name in names:
            passed = self.passed[name]
            if self._is_discarded or not isinstance(passed, PassedFile):
                return {}
            if name not in self._mapped:
                try:
                    self._mapped[name] = MappedFile(passed.fd, passed.size_bytes)
                except OSError:
                    return {}
                if not passed.sealed:
                    self._survive_cuts(name, self._mapped[name])
            found[name] = self._mapped[name].address
        return found

    def _survive_cuts(self, name: str, mapping: MappedFile) -> None:
        on_cut = partial(self._loop.call_soon_threadsafe, self._on_cut, name)
        self._bus_errors.watch(mapping.address, mapping.size_bytes, on_cut)

    # An engine's memory is freed in two steps, because a transfer may be in progress when it dies:
    #
    #     discard   immediately: frees the bytes; addresses stay, and read as zeros for live READs
    #     remove    after the last job and READ: deregisters the memory, then unmaps the addresses
    #
    # `take` checks again after it has waited. `register` waits in `define`, which fails once the
    # memory is discarded.
    async def discard(self) -> None:
        """Release the bytes in both processes; the addresses stay, and read as zeros."""
        if self._is_discarded:
            return
        self._is_discarded, failures = True, list[KVBusError]()
        for memory in self._memories:
            try:
                await self._data.discard(memory.defined)
            except KVBusError as error:
                failures.append(error)
        watched = [mapping.address for mapping in self._mapped.values()]
        try:  # a plan may contain the addresses, so they live as long as this object
            await in_thread(self.close)
        finally:
            for address in watched:
                self._bus_errors.unwatch(address)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close the files and mappings of this process. Blocks: large ones take long."""
        pages = [one for one in (self.cells, self.sequence) if one is not None]
        ones: list[MappedFile | Passed] = [*self._mapped.values(), *pages, *self.passed.values()]
        do_all([one.close for one in ones])

    def remove(self, memory: RegisteredRank | None = None) -> None:
        for one in [memory] if memory is not None else self._memories:
            self._data.remove(one.defined)

    def _check_new(self, segment_id: str, device: str | None) -> None:
        if self._is_discarded:
            raise _ended()
        self._check_room(f"'{segment_id}'", len(self.passed) + 1)
        if segment_id in self.passed:
            raise LocalError(f"segment '{segment_id}' was passed already", segment_id=segment_id)
        if device is not None and self._device not in (None, device):
            raise LocalError(
                f"segment '{segment_id}' is on {device}, those before it on {self._device}: a rank "
                "has all of its memory on one device",
                segment_id=segment_id,
            )

    @property
    def _num_parts(self) -> int:
        passed = self.passed.values()
        return sum(len(one.fds) for one in passed if isinstance(one, PassedGpuMemory))

    def _check_room(self, what: str, number: int) -> None:
        if number > MAX_PROCESS_SEGMENTS:
            raise SegmentError(
                f"{what} exceeds the limit of {MAX_PROCESS_SEGMENTS} segments of a process, and of "
                "parts of a segment: pass fewer and larger ones",
                code=ErrorCode.BUSY,
                limit=MAX_PROCESS_SEGMENTS,
            )

    def _check_passed(self, rank: RankSpec) -> None:
        for segment in rank.segments:
            passed = self.passed.get(segment.segment_id)
            if passed is None or passed.size_bytes < segment.size_bytes:
                raise LocalError(
                    f"segment '{segment.segment_id}' of {segment.size_bytes} bytes was not passed",
                    segment_id=segment.segment_id,
                )


def _part(name: str, passed: Passed) -> wire.SegmentPart:
    source = None if isinstance(passed, PassedFile) else passed.source
    return wire.SegmentPart(name, passed.size_bytes, cuda=source)


def _ended() -> LocalError:
    return LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
