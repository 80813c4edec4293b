"""Takes the memory that engine processes pass, within bounds, and sees when it is cut.

Refuses more segments of one process than the limit, with `busy`.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from kvbus.agent.engines.local_engine import EngineProcess
from kvbus.agent.staging.devices import StagingDevices
from kvbus.errors import ErrorCode, SegmentError
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import PassCuda, PassSegment, SegmentPassed
from kvbus.protocol.message import Empty

log = structlog.get_logger()


class SegmentIntake:
    """Maps what is passed; ``on_cut`` is told of a process whose memory is gone."""

    def __init__(
        self,
        staging: StagingDevices,
        bus_errors: BusErrors,
        *,
        max_segments: int,
        lend: bool,
        on_cut: Callable[[EngineProcess], None],
    ) -> None:
        self._staging, self._bus_errors = staging, bus_errors
        self._max_segments, self._lend, self._on_cut = max_segments, lend, on_cut

    async def take(
        self, process: EngineProcess, segment: PassSegment, fds: list[int]
    ) -> SegmentPassed:
        """Map the one descriptor of ``fds``; raises `KVBusError`."""
        self._check_room(process)
        mapping = await process.segments.take(segment, fds, self._staging, lend=self._lend)
        if not mapping.sealed:
            segment_id, loop = segment.segment_id, asyncio.get_running_loop()
            log.info("segment.unsealed", engine_id=process.engine_id, segment_id=segment_id)
            tell = partial(self._see_cut, process, segment_id)
            mapping.survive_cuts(self._bus_errors, partial(loop.call_soon_threadsafe, tell))
        return SegmentPassed(sealed=mapping.sealed)

    async def take_cuda(self, process: EngineProcess, segment: PassCuda) -> Empty:
        """Open memory of a GPU; raises `KVBusError`."""
        self._check_room(process)
        return await process.segments.take_cuda(segment, self._staging)

    def _check_room(self, process: EngineProcess) -> None:
        if len(process.segments.mappings) >= self._max_segments:
            raise SegmentError(
                f"this process has passed {self._max_segments} segments, which is the limit "
                "(max_process_segments): pass fewer and larger ones",
                code=ErrorCode.BUSY,
                limit=self._max_segments,
            )

    # Who touched the memory got zeros and goes on: a copy of ours that will be reported as done, or
    # a READ of a peer. The news was put into the loop before either, so the offers of the engine
    # have ended when somebody asks whether the zeros were any good.
    def _see_cut(self, process: EngineProcess, segment_id: str) -> None:
        if process.gone or (process.engine is not None and process.engine.lost):
            return
        log.error("segment.cut", engine_id=process.engine_id, segment_id=segment_id)
        self._on_cut(process)
