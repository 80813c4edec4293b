"""The memory session of one rank: its KV cache, or its host blocks, shared with the agent.

Refuses memory that the agent cannot map: an engine on such a device copies through host blocks.
"""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Self, Unpack

import torch

from kvbus.engine.rank_memory import KvCache, RankMemory, Storage
from kvbus.engine.session import EngineSession, SessionOptions
from kvbus.errors import GeometryError, LocalError
from kvbus.geometry import EngineSpec, KvLayout, RankSpec
from kvbus.memory.cuda import CudaEvent, CudaStorage
from kvbus.memory.segment import HugePages
from kvbus.protocol.attach import PassCuda, PassSegment
from kvbus.protocol.engine import Fetched, Register
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import from_body

OnFetched = Callable[[Fetched], None]


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
