"""KV memory of ranks: mapped here, or as addresses at peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvbus.data.messages import HOST, AddMemory, CudaPart
from kvbus.data.nixl import Registration
from kvbus.data.slots import cuda
from kvbus.errors import LocalError, ProtocolError, SegmentError, TransferFailed
from kvbus.geometry import EngineSpec, GroupSpec, RankSpec
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.copying import PagedMemory
from kvbus.memory.mapping import POPULATE_WITHIN_S, SegmentMapping, do_all
from kvbus.memory.memory_limits import check_mappings
from kvbus.planning import Extents, PlacedRank

if TYPE_CHECKING:
    from kvbus.memory.cuda import CopyStream, CudaMapping

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
    on_cuda_lost: Callable[[Exception], object]
    """Called by any thread when CUDA fails for good in this process."""
    device: str = HOST
    stream: CopyStream | None = None
    gone: str = ""
    """Reason why some bytes are not the engine's own."""
    registrations: dict[str, Registration] = field(default_factory=dict)
    refused: SegmentError | None = None
    _paged: dict[str, PagedMemory] = field(init=False, repr=False, default_factory=dict)

    @property
    def addresses(self) -> dict[str, int]:
        mapped = self.mappings.items()
        return {name: one.address for name, one in mapped if isinstance(one, SegmentMapping)}

    @property
    def extents(self) -> Extents:
        mapped = self.mappings.values()
        found = [one for one in mapped if isinstance(one, SegmentMapping)]
        return [(one.address, one.address + one.size_bytes) for one in found]

    @property
    def placed(self) -> PlacedRank:
        return PlacedRank(self.engine, self.rank, self.addresses)

    def check_is_there(self) -> None:
        if self.gone:
            raise TransferFailed(f"the memory of engine '{self.engine.engine_id}' {self.gone}")

    def paged(self, group: str) -> PagedMemory:
        """Call it in a thread."""
        if group not in self._paged:
            buffers = {name: mapping.view() for name, mapping in self.mappings.items()}
            mover = None if self.stream is None else cuda().GpuMover([*buffers.values()])
            spec: GroupSpec = self.engine.group(group)
            self._paged[group] = PagedMemory(spec, self.rank.regions, buffers, mover=mover)
        return self._paged[group]

    def run(self, copy: Callable[[], None]) -> None:
        """Raises `TransferFailed` if CUDA is lost."""
        if self.stream is None:
            copy()
            return
        try:
            self.stream.run(copy)
        except RuntimeError as error:
            if not cuda().is_context_lost():
                raise
            self.on_cuda_lost(error)
            raise TransferFailed(f"CUDA is lost to the data process: {error}") from error

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
        do_all(mapping.discard for mapping in self.mappings.values())

    def close(self) -> None:
        """Call it in a thread. Raises the first `KVBusError` at the end."""
        self._paged.clear()
        do_all(mapping.close for mapping in self.mappings.values())


def map_rank(
    added: AddMemory,
    fds: list[int],
    bus_errors: BusErrors,
    *,
    on_cut: OnTruncated,
    on_cuda_lost: Callable[[Exception], object],
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
                _open_cuda(segment.cuda, segment.size_bytes)
                if segment.cuda is not None
                else SegmentMapping(
                    _next(fds), size_bytes=segment.size_bytes, borrowed=added.borrowed
                )
            )
        _check_sizes(added.rank, mappings)
        memory = _memory_of(added, mappings, on_cuda_lost)
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
    added: AddMemory,
    mappings: Mapping[str, Mapped],
    on_cuda_lost: Callable[[Exception], object],
) -> LocalMemory:
    parts = [segment.cuda for segment in added.segments if segment.cuda is not None]
    if not parts:
        return LocalMemory(added.engine, added.rank, mappings, added.direct, on_cuda_lost)
    if len(parts) < len(mappings) or len({part.device for part in parts}) > 1:
        raise LocalError("a rank has all of its memory on one device")
    device = parts[0].device
    stream = cuda().CopyStream(cuda().gpu_ordinal(device))
    return LocalMemory(added.engine, added.rank, mappings, False, on_cuda_lost, device, stream)


def _open_cuda(part: CudaPart, size_bytes: int) -> CudaMapping:
    mapping: CudaMapping = cuda().CudaMapping(
        part.device, part.handle, offset_bytes=part.offset_bytes, size_bytes=size_bytes
    )
    return mapping


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
