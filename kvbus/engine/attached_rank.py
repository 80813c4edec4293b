"""One rank of an engine as its agent knows it: segments that were passed, then the registration."""

import uuid

from kvbus.engine.connection import Connection
from kvbus.engine.rank_memory import RankMemory, Storage
from kvbus.engine.sequence import Recorder
from kvbus.engine.storage import CudaStorage, SharedStorage
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec
from kvbus.memory.attach import MAX_FDS
from kvbus.memory.cuda import GpuAllocation, GpuMemory
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.attach import PassCuda, PassSegment
from kvbus.protocol.engine import SEQUENCE_BYTES, AgentRole, Register

CELLS_ID, SEQUENCE_ID = "kvbus-cells", "kvbus-sequence"


class AttachedRank:
    def __init__(
        self, engine: EngineSpec, memory: RankMemory, rank_secret: str | None, recorder: Recorder
    ) -> None:
        self.cells: SharedSegment | None = None
        self.number = memory.rank.rank
        self._engine, self._memory, self._rank_secret = engine, memory, rank_secret
        self._instance = uuid.uuid4().hex
        gpus = [one.ordinal for one in map(gpu_memory_of, memory.storages.values()) if one]
        self._sequence = recorder.page(gpus[0] if gpus else None)
        if {segment.segment_id for segment in memory.rank.segments} != memory.storages.keys():
            raise GeometryError("storages and the rank's segments have different ids")

    async def register(self, connection: Connection) -> None:
        for segment_id, storage in self._memory.storages.items():
            memory = gpu_memory_of(storage)
            if memory is not None:
                await _pass_cuda(connection, segment_id, memory)
            elif isinstance(storage, SharedStorage | SharedSegment):
                await connection.pass_memory(
                    PassSegment(
                        segment_id=segment_id,
                        size_bytes=storage.size_bytes,
                        direct=self._memory.direct,
                    ),
                    storage.fd,
                )
        if self.cells is not None and connection.agent.role is AgentRole.PREFILL:
            page = PassSegment(CELLS_ID, self.cells.size_bytes, kind="cells")
            await connection.pass_memory(page, self.cells.fd)
        self._sequence.open()
        page = PassSegment(SEQUENCE_ID, SEQUENCE_BYTES, kind="sequence")
        await connection.pass_memory(page, self._sequence.fd)
        register = Register(
            engine=self._engine,
            rank=self._memory.rank,
            rank_secret=self._rank_secret,
            instance=self._instance,
        )
        await connection.request(register)


def gpu_memory_of(storage: Storage) -> GpuMemory | None:
    if isinstance(storage, CudaStorage | GpuAllocation):
        return storage.memory
    return storage if isinstance(storage, GpuMemory) else None


async def _pass_cuda(connection: Connection, segment_id: str, memory: GpuMemory) -> None:
    """Export the memory that is mapped now: a sleep mode may have replaced it."""
    with memory.exported() as (source, fds):
        for first in range(0, max(1, len(fds)), MAX_FDS):
            some = slice(first, first + MAX_FDS)
            message = PassCuda(
                segment_id=segment_id,
                device=source.device,
                handle=source.handle,
                offset_bytes=source.offset_bytes,
                size_bytes=memory.size_bytes,
                parts=source.parts[some],
            )
            await connection.pass_memory(message, *fds[some])
