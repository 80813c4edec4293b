"""The memory session of one rank: its KV cache, or its ring of host blocks, shared with the agent.

Refuses memory that the agent cannot map: an engine on such a device copies through a ring.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from kvbus.engine.host.buffer import HostBuffer
from kvbus.engine.host.sizing import RING_LAYOUT
from kvbus.engine.region_tensor import region_tensor
from kvbus.engine.session import EngineSession
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, KvLayout, RankSpec, lay_out_rank
from kvbus.memory.segment import SharedSegment
from kvbus.memory.storage import SharedStorage
from kvbus.protocol.engine import PassSegment, SegmentPassed


class KvCache:
    """A rank's KV cache: a torch view for each layer and part.

    The views share the memory that the agent reads and writes, whatever its layout is. ``buffer``
    is all of it, one row of uint8.
    """

    def __init__(self, engine: EngineSpec, rank: RankSpec, buffer: torch.Tensor) -> None:
        self.rank = rank
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        for region in rank.regions:
            tensor = region_tensor(engine, region, buffer)
            for number, layer in enumerate(region.layers):
                for at, part in enumerate(region.parts):
                    self._views[layer, part] = tensor[:, number, at]

    def view(self, layer: int, part: str) -> torch.Tensor:
        """One part of one layer, as K: [block, token, head, dim] with the layout's strides.

        Of a state: [block, 1, unit, byte of a unit], uint8. Raises `KeyError` when the rank does
        not hold it, as another pipeline stage does.
        """
        return self._views[layer, part]


class MemorySession(EngineSession):
    """Registers the memory of one rank; the memory is the agent's to use while this is open."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        rank: int,
        *,
        attach_timeout_s: float = 0.0,
        request_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            attach_path,
            engine,
            attach_timeout_s=attach_timeout_s,
            request_timeout_s=request_timeout_s,
        )
        self.rank = rank
        self._segments: list[SharedSegment] = []

    async def allocate(self, layout: KvLayout, *, num_blocks: int | Mapping[str, int]) -> KvCache:
        """Allocate the rank's whole KV cache, zeroed, and register it.

        ``num_blocks`` is that of every group, or by group.
        Raises `SegmentError` when there is not enough memory.
        """
        rank, segment = await self._allocate(layout, num_blocks)
        return KvCache(self.engine, rank, segment.tensor)

    async def allocate_ring(self, num_blocks: Mapping[str, int]) -> HostBuffer:
        """Allocate the rank's part of a ring of host blocks, and register it as its cache.

        For an engine whose own cache no agent can map. Raises `SegmentError`, as `allocate` does.
        """
        return HostBuffer(self.engine, *await self._allocate(RING_LAYOUT, num_blocks))

    async def register(self, rank: RankSpec, storages: Mapping[str, SharedStorage]) -> None:
        """Register memory that the engine already had and moved with `share_tensor`.

        ``storages`` are by segment id, as the regions of ``rank`` name them.
        """
        if {segment.segment_id for segment in rank.segments} != storages.keys():
            raise GeometryError("storages and the rank's segments have different ids")
        for segment_id, storage in storages.items():
            await self._pass(segment_id, storage.fd, storage.size_bytes)
        await self._register(rank)

    async def _allocate(
        self, layout: KvLayout, num_blocks: int | Mapping[str, int]
    ) -> tuple[RankSpec, SharedSegment]:
        rank = lay_out_rank(self.engine, self.rank, layout, num_blocks=num_blocks)
        wanted = rank.segments[0]
        segment = SharedSegment(wanted.size_bytes, name=f"kvbus-{self.engine.engine_id}")
        self._exit.callback(segment.close)
        await self._pass(wanted.segment_id, segment.fd, segment.size_bytes)
        await self._register(rank)
        return rank, segment

    async def _pass(self, segment_id: str, fd: int, size_bytes: int) -> None:
        message = PassSegment(segment_id=segment_id, size_bytes=size_bytes)
        await self._call(message, SegmentPassed, (fd,))
