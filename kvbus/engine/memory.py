"""The memory session of one rank: its KV cache, or its host blocks, shared with the agent.

Refuses memory that the agent cannot map: an engine on such a device copies through host blocks.
"""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Self, Unpack

import torch

from kvbus.engine.bounce.buffer import HostBuffer
from kvbus.engine.bounce.sizing import HOST_LAYOUT
from kvbus.engine.fetch import OnFetched
from kvbus.engine.region_tensor import region_tensor
from kvbus.engine.session import EngineSession, SessionOptions
from kvbus.errors import GeometryError, LocalError, SegmentError
from kvbus.geometry import EngineSpec, KvLayout, RankSpec, lay_out_rank
from kvbus.memory.cuda import CudaEvent, CudaStorage, allocate_cuda
from kvbus.memory.segment import HugePages, SharedSegment, shmem_word
from kvbus.memory.storage import SharedStorage
from kvbus.protocol.attach import PassCuda, PassSegment
from kvbus.protocol.engine import Fetched, Register
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import from_body

log = logging.getLogger("kvbus.engine")

Storage = SharedStorage | CudaStorage | SharedSegment


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
    """Registers the memory of one rank; the memory is the agent's to use while this is open.

    ``on_fetched`` is called for each fetch of the engine that ended, in the session's thread: for
    workers that tell their engine before its control session could. It needs a rank that is
    attached to the engine's home. What this allocates ends with it, or with ``storages``.
    ``access`` is shown by those who ask about a rank that is not at home: the control session names
    it (`ControlSession.register`), so all sessions at one agent are given the same. It is a secret.
    """

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        rank: int,
        *,
        on_fetched: OnFetched | None = None,
        storages: ExitStack | None = None,
        access: str | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(attach_path, engine, **options)
        self.rank, self.access = rank, access
        self._on_fetched, self._storages = on_fetched, storages
        self._registered: tuple[RankSpec, Mapping[str, Storage], bool] | None = None
        self._event: CudaEvent | None = None
        self._passed: list[CudaStorage] = []

    async def allocate(
        self,
        layout: KvLayout,
        *,
        num_blocks: int | Mapping[str, int],
        device: torch.device | str = "cpu",
        direct: bool = True,
        huge_pages: HugePages = False,
    ) -> KvCache:
        """Allocate the rank's whole KV cache, zeroed, and register it.

        ``num_blocks`` is that of every group, or by group. With ``direct`` False the memory is
        unregistered: NIXL, and so a NIC, never pins it, and its KV goes through the agent's slots.
        That of a CUDA ``device`` always is; see `record`. ``huge_pages`` are those of
        `SharedSegment`; a machine that gives none is logged. Raises `SegmentError` when there is
        not enough memory, or no such device.
        """
        rank = lay_out_rank(self.engine, self.rank, layout, num_blocks=num_blocks)
        storage = allocate_storage(self.engine, rank, device, huge_pages=huge_pages)
        return KvCache(self.engine, rank, await self._share(rank, storage, direct=direct))

    async def allocate_ring(self, num_blocks: Mapping[str, int]) -> HostBuffer:
        """Allocate the rank's host blocks, which its own copies go through, and register them.

        For an engine whose own cache no agent can map. Raises `SegmentError`, as `allocate` does.
        """
        rank = lay_out_rank(self.engine, self.rank, HOST_LAYOUT, num_blocks=num_blocks)
        storage = allocate_storage(self.engine, rank)
        return HostBuffer(self.engine, rank, await self._share(rank, storage, direct=True))

    async def register(
        self,
        rank: RankSpec,
        storages: Mapping[str, Storage],
        *,
        direct: bool = True,
    ) -> None:
        """Register memory that the engine already had, and shared with `share_tensor`.

        ``storages`` are by segment id, as the regions of ``rank`` name them; ``direct`` as for
        `allocate`. They stay the engine's, which closes them after this session.
        """
        if {segment.segment_id for segment in rank.segments} != storages.keys():
            raise GeometryError("storages and the rank's segments have different ids")
        for segment_id, storage in storages.items():
            if isinstance(storage, CudaStorage):
                await self._pass_cuda(segment_id, storage)
            else:
                message = PassSegment(
                    segment_id=segment_id, size_bytes=storage.size_bytes, direct=direct
                )
                await self._call(message, (storage.fd,))
        notices = self._on_fetched is not None
        await self.request(
            Register(
                engine=self.engine,
                rank=rank,
                notices=notices,
                access=self.access,
            )
        )
        self._registered = rank, storages, direct

    async def resume(self, before: Self) -> None:
        """Register the memory again."""
        if before._registered is not None:
            rank, storages, direct = before._registered
            await self.register(rank, storages, direct=direct)

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark what ``stream``, or the current one, of the rank's GPU was given so far.

        Call it before each `offer`, `extend`, `seal` and `fetch` that is about this rank's blocks:
        the agent copies after that work, so the engine need not wait for its GPU. It returns at
        once. Raises `LocalError` for a rank without CUDA memory.
        """
        if self._event is None:
            raise LocalError("record() is for a rank with CUDA memory, which this session has not")
        self._event.record(stream)

    def _on_notice(self, notice: Notice) -> None:
        if self._on_fetched is not None and notice.op == Fetched.op:
            self._on_fetched(from_body(Fetched, notice.body))

    async def _share(
        self, rank: RankSpec, storage: SharedSegment | CudaStorage, *, direct: bool
    ) -> torch.Tensor:
        """Register new memory; returns all of its bytes."""
        owner: ExitStack | AsyncExitStack = self._exit if self._storages is None else self._storages
        owner.callback(storage.close)
        await self.register(rank, {rank.segments[0].segment_id: storage}, direct=direct)
        return storage.tensor

    async def _pass_cuda(self, segment_id: str, storage: CudaStorage) -> None:
        if self._event is None:
            self._event = CudaEvent(storage.ordinal)
        self._passed.append(storage)
        message = PassCuda(
            segment_id=segment_id,
            device=storage.device,
            handle=storage.handle,
            offset_bytes=storage.offset_bytes,
            size_bytes=storage.size_bytes,
            event=self._event.handle,
        )
        await self._call(message)


def allocate_storage(
    engine: EngineSpec,
    rank: RankSpec,
    device: torch.device | str = "cpu",
    *,
    huge_pages: HugePages = False,
) -> SharedSegment | CudaStorage:
    """Zeroed memory for all of a rank's one segment; raises `SegmentError`."""
    size_bytes, where = rank.segments[0].size_bytes, torch.device(device)
    if where.type == "cuda":
        return allocate_cuda(size_bytes, where)
    if where.type != "cpu":
        raise SegmentError(
            f"no agent can open memory of {where}: use cpu, a cuda device, or a buffer of host "
            "blocks"
        )
    segment = SharedSegment(size_bytes, name=f"kvbus-{engine.engine_id}", huge_pages=huge_pages)
    if huge_pages and not segment.uses_huge_pages:
        log.warning(
            "the KV cache of rank %d of '%s' has ordinary pages: this machine gives no huge ones "
            "(shmem_enabled is '%s'; see kvbus doctor)",
            rank.rank,
            engine.engine_id,
            shmem_word(),
        )
    return segment
