"""The memory session of one rank: its KV cache, or its host blocks, shared with the agent.

Refuses memory that the agent cannot map: an engine on such a device copies through host blocks.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, Unpack

import torch

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
OnFetched = Callable[[Fetched], None]


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank: what is in it, and the storages that an agent maps.

    ``storages`` are by segment id, as the regions of ``rank`` name them. With ``direct`` False
    NIXL, and so a NIC, never pins it, and its KV goes through the agent's slots; that of a CUDA
    device always does.
    """

    rank: RankSpec
    storages: Mapping[str, Storage]
    direct: bool = True

    @classmethod
    def allocate(
        cls,
        engine: EngineSpec,
        rank: int,
        layout: KvLayout,
        *,
        num_blocks: int | Mapping[str, int],
        device: torch.device | str = "cpu",
        direct: bool = True,
        huge_pages: HugePages = False,
    ) -> "RankMemory":
        """Zeroed memory for the rank's whole KV cache; `KvCache` gives views of it.

        ``num_blocks`` is that of every group, or by group. ``huge_pages`` are those of
        `SharedSegment`; a machine that gives none is logged. Raises `SegmentError` when there is
        not enough memory, or no such device.
        """
        spec = lay_out_rank(engine, rank, layout, num_blocks=num_blocks)
        (segment,) = spec.segments
        where = torch.device(device)
        storage: Storage
        if where.type == "cuda":
            storage = allocate_cuda(segment.size_bytes, where)
        elif where.type == "cpu":
            storage = _allocate_shared(engine, spec, huge_pages=huge_pages)
        else:
            raise SegmentError(
                f"no agent can open memory of {where}: use cpu, a cuda device, or a buffer of host "
                "blocks"
            )
        return cls(spec, {segment.segment_id: storage}, direct)

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes of what `allocate` made, one row of uint8."""
        (storage,) = self.storages.values()
        if not isinstance(storage, SharedSegment | CudaStorage):
            raise LocalError("this memory was not allocated here: its tensors are the engine's")
        return storage.tensor

    def close(self) -> None:
        """Close the descriptors, once no `Link` needs them; tensors keep their memory."""
        for storage in self.storages.values():
            storage.close()


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
    attached to the engine's home. What this keeps ends with it, or with ``storages``.
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
        """`RankMemory.allocate`, and register it."""
        memory = RankMemory.allocate(
            self.engine,
            self.rank,
            layout,
            num_blocks=num_blocks,
            device=device,
            direct=direct,
            huge_pages=huge_pages,
        )
        await self.keep(memory)
        return KvCache(self.engine, memory.rank, memory.tensor)

    async def keep(self, memory: RankMemory) -> RankMemory:
        """Register memory that ends with this session, or with its ``storages``; returns it."""
        owner: ExitStack | AsyncExitStack = self._exit if self._storages is None else self._storages
        owner.callback(memory.close)
        await self.register(memory.rank, memory.storages, direct=memory.direct)
        return memory

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


def _allocate_shared(engine: EngineSpec, rank: RankSpec, *, huge_pages: HugePages) -> SharedSegment:
    size_bytes = rank.segments[0].size_bytes
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
