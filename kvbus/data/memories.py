"""KV memory of ranks: mapped here, or as addresses at peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvbus.data.messages import HOST, AddMemory, SegmentPart
from kvbus.data.nixl import Registration
from kvbus.errors import LocalError, ProtocolError, SegmentError, TransferFailed
from kvbus.geometry import EngineSpec, GroupSpec, RankSpec
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.copying import ByteRange, HostMover, PagedMemory
from kvbus.memory.cuda import CudaMapping, GpuCopier, gpu_ordinal, pin_for
from kvbus.memory.mapping import POPULATE_WITHIN_S, SegmentMapping, do_all
from kvbus.memory.memory_limits import check_mappings
from kvbus.planning import Extents, PlacedRank

Mapped = SegmentMapping | CudaMapping

MAPPINGS_A_CHECK = 64
OnTruncated = Callable[[str], object]
"""Called in the thread that touched a segment. It must not block."""


@dataclass(slots=True, eq=False)
class RemoteMemory:
    peer: str
    placed: PlacedRank


# A copy knows only addresses, and its thread cannot be stopped. Hence these rules:
#
#     its engine or its agent ends   `gone` is set, then `discard` puts zeros under all addresses
#     its file is truncated          SIGBUS in a copy: `gone` is set, then zeros are put there
#     it is removed                  no job names it; views keep the addresses
#
#     copy   ──read──read──[gone]──zero──zero──┐ the last part has ended
#                                              └─ is `gone` set? then the job has failed
#
# A job checks `gone` after its last part. If it is empty, all bytes that the job read were real.
@dataclass(slots=True, eq=False, weakref_slot=True)
class LocalMemory:
    engine: EngineSpec
    rank: RankSpec
    mappings: Mapping[str, Mapped]
    direct: bool
    device: str = HOST
    mover: HostMover | GpuCopier = field(default_factory=HostMover)
    gpu_copier: GpuCopier | None = None
    """Copies into this memory; None for copies by this process."""
    unpins: Sequence[Callable[[], object]] = ()
    gone: str = ""
    """Reason why some bytes are not the engine's own."""
    registrations: dict[str, Registration] = field(default_factory=dict)
    refused: SegmentError | None = None
    _paged: dict[str, PagedMemory] = field(init=False, repr=False, default_factory=dict)

    @property
    def addresses(self) -> dict[str, int]:
        return {name: one.address for name, one in self.mappings.items()}

    @property
    def extents(self) -> Extents:
        mapped = self.mappings.values()
        return [(one.address, one.address + one.size_bytes) for one in mapped]

    @property
    def placed(self) -> PlacedRank:
        return PlacedRank(self.engine, self.rank, self.addresses)

    def check_is_there(self) -> None:
        if self.gone:
            raise TransferFailed(f"the memory of engine '{self.engine.engine_id}' {self.gone}")

    def paged(self, group: str) -> PagedMemory:
        """Call it in a thread."""
        if group not in self._paged:
            mapped = self.mappings.items()
            segments = {name: ByteRange(one.address, one.size_bytes) for name, one in mapped}
            spec: GroupSpec = self.engine.group(group)
            self._paged[group] = PagedMemory(spec, self.rank.regions, segments, self.mover)
        return self._paged[group]

    def room(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory for copies of this thread, until it asks again."""
        if isinstance(self.mover, HostMover):
            return np.empty(num_bytes, np.uint8)
        return self.mover.room(num_bytes)

    def populate(self) -> None:
        """Call it in a thread: it takes up to 2 s."""
        deadline = time.monotonic() + POPULATE_WITHIN_S
        for mapping in self.mappings.values():
            if isinstance(mapping, SegmentMapping) and not self.gone:
                mapping.populate(deadline - time.monotonic(), is_needed=lambda: not self.gone)

    # An engine's memory is released in two steps, as a transfer may be in flight when the engine
    # crashes:
    #
    #     discard   at once: frees the bytes; the addresses stay, as zeros, for READs in flight
    #     close     when no job names it and NIXL does not know it: frees the addresses
    def discard(self) -> None:
        """Call it in a thread."""
        do_all([*self.unpins, *(mapping.discard for mapping in self.mappings.values())])

    def close(self) -> None:
        """Call it in a thread. Raises the first `KVBusError` at the end."""
        self._paged.clear()
        do_all([*self.unpins, *(mapping.close for mapping in self.mappings.values())])


class GpuCopiers:
    """Copiers by GPU. ``on_lost`` is called by any thread when CUDA fails for good here."""

    def __init__(self, on_lost: Callable[[Exception], object]) -> None:
        self._on_lost, self._lock = on_lost, Lock()
        self._copiers: dict[str, GpuCopier] = {}

    def of(self, device: str) -> GpuCopier:
        """Call it in a thread: it may take seconds. Raises `SegmentError`."""
        with self._lock:
            if device not in self._copiers:
                self._copiers[device] = GpuCopier(gpu_ordinal(device), self._on_lost)
            return self._copiers[device]


def map_rank(
    added: AddMemory,
    fds: list[int],
    bus_errors: BusErrors,
    *,
    on_cut: OnTruncated,
    copiers: GpuCopiers,
) -> LocalMemory:
    """Call it in a thread: it takes seconds. Owns ``fds``. Raises `LocalError`."""
    mappings: dict[str, Mapped] = {}
    try:
        for number, segment in enumerate(added.segments):
            if number % MAPPINGS_A_CHECK == 0:
                check_mappings()
            if segment.segment_id in mappings:
                raise LocalError(f"segment '{segment.segment_id}' comes twice")
            mappings[segment.segment_id] = (
                _open_gpu_memory(segment, fds, added.readers)
                if segment.cuda is not None
                else SegmentMapping(
                    _next(fds), size_bytes=segment.size_bytes, borrowed=added.borrowed
                )
            )
        _check_sizes(added.rank, mappings)
        memory = _memory_of(added, mappings, copiers)
    except BaseException:
        close_fds(fds)
        do_all(mapping.close for mapping in mappings.values())
        raise
    for name, mapping in mappings.items():
        if isinstance(mapping, SegmentMapping) and not mapping.sealed:
            mapping.survive_truncation(bus_errors, partial(on_cut, name))
    return memory


def close_fds(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _memory_of(
    added: AddMemory, mappings: Mapping[str, Mapped], copiers: GpuCopiers
) -> LocalMemory:
    sources = [segment.cuda for segment in added.segments if segment.cuda is not None]
    if not sources:
        memory = LocalMemory(added.engine, added.rank, mappings, added.direct)
        return _pinned(memory, copiers.of(added.readers[0])) if added.readers else memory
    devices = {source.device for source in sources}
    if len(sources) < len(mappings) or len(devices) > 1:
        raise LocalError("a rank has all of its memory on one device")
    (device,) = devices
    mover = copiers.of(added.readers[0] if added.readers else device)
    return LocalMemory(added.engine, added.rank, mappings, False, device, mover, mover)


def _pinned(memory: LocalMemory, copier: GpuCopier) -> LocalMemory:
    memory.gpu_copier = copier
    memory.unpins = [
        pin_for(one, one.address, one.size_bytes, ordinal=copier.ordinal)
        for one in memory.mappings.values()
    ]
    return memory


def _open_gpu_memory(segment: SegmentPart, fds: list[int], readers: Sequence[str]) -> CudaMapping:
    source = segment.cuda
    if source is None:
        raise LocalError(f"segment '{segment.segment_id}' is not on a GPU")
    mine = [_next(fds) for _ in source.parts]
    try:
        return CudaMapping(source, segment.size_bytes, mine, readers=readers)
    finally:
        close_fds(mine)


def _next(fds: list[int]) -> int:
    if not fds:
        raise ProtocolError("a segment came without a descriptor")
    return fds.pop(0)


def _check_sizes(rank: RankSpec, mappings: Mapping[str, Mapped]) -> None:
    for segment in rank.segments:
        mapping = mappings.get(segment.segment_id)
        if mapping is None or mapping.size_bytes < segment.size_bytes:
            raise LocalError(
                f"segment '{segment.segment_id}' of {segment.size_bytes} bytes was not passed",
                segment_id=segment.segment_id,
            )


def host_registrations(memory: LocalMemory) -> Sequence[tuple[str, Registration]]:
    return [
        (name, Registration(mapping.address, mapping.size_bytes, 0, "DRAM"))
        for name, mapping in memory.mappings.items()
        if isinstance(mapping, SegmentMapping)
    ]
