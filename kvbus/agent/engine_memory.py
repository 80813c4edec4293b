"""The memory of a local engine as its agent holds it: mapped, registered, and given back.

Refuses to give addresses back while a transfer may still touch them; the bytes go at once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio

from kvbus.errors import ErrorCode, LocalError
from kvbus.geometry import AxisName, EngineSpec, RankSpec
from kvbus.memory.mapping import SegmentMapping
from kvbus.planning import PlacedRank
from kvbus.protocol.engine import PassSegment
from kvbus.transport import Registration, Transport


@dataclass(slots=True, eq=False)
class RankMemory:
    """One rank: its spec, and its segments, mapped; registered with NIXL unless staged only."""

    rank: RankSpec
    mappings: Mapping[str, SegmentMapping]
    registrations: tuple[Registration, ...]
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
        """Where each segment begins in this process; empty when peers cannot use that."""
        if not self.direct:
            return {}
        return {name: mapping.address for name, mapping in self.mappings.items()}

    def placed(self, engine: EngineSpec) -> PlacedRank:
        """The rank as the planner wants it."""
        return PlacedRank(engine, self.rank, self.addresses)


@dataclass(slots=True, eq=False)
class Segments:
    """The segments that one engine process has passed, until it registers them or dies.

    ``direct`` is False when one of them is staged only: then NIXL is told of none.
    `register` and `unmap` take turns, so that neither finds the other half done.
    """

    mappings: dict[str, SegmentMapping] = field(default_factory=dict)
    registrations: dict[str, Registration] = field(default_factory=dict)
    direct: bool = True
    unmapped: bool = False
    turn: anyio.Lock = field(default_factory=anyio.Lock)

    async def add(self, segment: PassSegment, fd: int) -> SegmentMapping:
        """Map a passed descriptor, in a thread, as reserving its pages can take long."""
        segment_id, size_bytes = segment.segment_id, segment.size_bytes
        if segment_id in self.mappings:
            raise LocalError(f"segment '{segment_id}' was passed already", segment_id=segment_id)
        mapping = await anyio.to_thread.run_sync(lambda: SegmentMapping(fd, size_bytes=size_bytes))
        if self.unmapped:
            mapping.unmap()
            raise _ended()
        self.mappings[segment_id] = mapping
        self.direct &= segment.direct
        return mapping

    async def register(self, rank: RankSpec, transport: Transport) -> RankMemory:
        """Register every segment of ``rank``, unless it is staged only.

        Raises `LocalError` when a segment was not passed.
        """
        async with self.turn:
            if self.unmapped:
                raise _ended()
            self._check_passed(rank)
            for name, mapping in list(self.mappings.items()):  # more may be passed meanwhile
                if self.direct and name not in self.registrations:
                    future = transport.register(mapping.address, mapping.size_bytes)
                    self.registrations[name] = await asyncio.wrap_future(future)
            return RankMemory(rank, self.mappings, tuple(self.registrations.values()))

    def discard(self) -> None:
        """Give the bytes back to the machine now; the addresses stay, as private zeros."""
        for mapping in self.mappings.values():
            mapping.discard()

    async def unmap(self, transport: Transport) -> None:
        """Deregister and give the addresses back; nothing may be in flight any more."""
        self.unmapped = True
        async with self.turn:
            for registration in self.registrations.values():
                await asyncio.wrap_future(transport.deregister(registration))
            self.registrations.clear()
            for mapping in self.mappings.values():
                mapping.unmap()

    def _check_passed(self, rank: RankSpec) -> None:
        for segment in rank.segments:
            mapping = self.mappings.get(segment.segment_id)
            if mapping is None or mapping.size_bytes < segment.size_bytes:
                raise LocalError(
                    f"segment '{segment.segment_id}' of {segment.size_bytes} bytes was not passed",
                    segment_id=segment.segment_id,
                )


def _ended() -> LocalError:
    return LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
