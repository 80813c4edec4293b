"""The memory of a local engine as its agent holds it: mapped, registered, and given back.

Refuses to give addresses back while a transfer may still touch them; the bytes go at once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio

from kvbus.errors import LocalError
from kvbus.geometry import AxisName, EngineSpec, RankSpec
from kvbus.memory.mapping import SegmentMapping
from kvbus.planning import PlacedRank
from kvbus.transport import Registration, Transport


@dataclass(slots=True, eq=False)
class RankMemory:
    """One rank: its spec, and its segments, mapped and registered with NIXL."""

    rank: RankSpec
    mappings: Mapping[str, SegmentMapping]
    registrations: tuple[Registration, ...]

    @property
    def addresses(self) -> dict[str, int]:
        """Where each segment begins in this process."""
        return {name: mapping.address for name, mapping in self.mappings.items()}

    def placed(self, engine: EngineSpec) -> PlacedRank:
        """The rank as the planner wants it."""
        return PlacedRank(engine, self.rank, self.addresses)

    def num_blocks(self, group: str) -> int:
        """Blocks that this rank's cache has for ``group``."""
        regions = (region for region in self.rank.regions if region.group == group)
        return min((region.size(AxisName.BLOCK) for region in regions), default=0)


@dataclass(slots=True, eq=False)
class Segments:
    """The segments that one engine process has passed, until it registers them or dies."""

    mappings: dict[str, SegmentMapping] = field(default_factory=dict)
    registrations: dict[str, Registration] = field(default_factory=dict)

    async def add(self, segment_id: str, fd: int, size_bytes: int) -> SegmentMapping:
        """Map a passed descriptor, in a thread, as reserving its pages can take long."""
        if segment_id in self.mappings:
            raise LocalError(f"segment '{segment_id}' was passed already", segment_id=segment_id)
        mapping = await anyio.to_thread.run_sync(lambda: SegmentMapping(fd, size_bytes=size_bytes))
        self.mappings[segment_id] = mapping
        return mapping

    async def register(self, rank: RankSpec, transport: Transport) -> RankMemory:
        """Register every segment of ``rank``; raises `LocalError` when one was not passed."""
        for segment in rank.segments:
            mapping = self.mappings.get(segment.segment_id)
            if mapping is None or mapping.size_bytes < segment.size_bytes:
                raise LocalError(
                    f"segment '{segment.segment_id}' of {segment.size_bytes} bytes was not passed",
                    segment_id=segment.segment_id,
                )
        for name, mapping in self.mappings.items():
            if name not in self.registrations:
                future = transport.register(mapping.address, mapping.size_bytes)
                self.registrations[name] = await asyncio.wrap_future(future)
        return RankMemory(rank, self.mappings, tuple(self.registrations.values()))

    def discard(self) -> None:
        """Give the bytes back to the machine now; the addresses stay, as private zeros."""
        for mapping in self.mappings.values():
            mapping.discard()

    async def unmap(self, transport: Transport) -> None:
        """Deregister and give the addresses back; nothing may be in flight any more."""
        for registration in self.registrations.values():
            await asyncio.wrap_future(transport.deregister(registration))
        self.registrations.clear()
        for mapping in self.mappings.values():
            mapping.unmap()
