"""Takes the memory that an engine process passes on the attach socket."""

import structlog

from kvbus.agent.engines.local_engine import EngineProcess
from kvbus.agent.staging.devices import StagingDevices
from kvbus.errors import ProtocolError
from kvbus.protocol.attach import PassCuda, PassSegment, SegmentPassed
from kvbus.protocol.message import Empty

log = structlog.get_logger()


class MemoryImport:
    """Maps what is passed; ``staging`` are the slots that unregistered memory needs."""

    def __init__(self, staging: StagingDevices) -> None:
        self._staging = staging

    async def import_segment(
        self, process: EngineProcess, passed: PassSegment, fds: list[int]
    ) -> SegmentPassed:
        """Map the one descriptor of ``fds``, and take it out of there.

        Raises `ProtocolError`, `SegmentError`, and `LocalError` (``config``) without slots.
        """
        if len(fds) != 1:
            raise ProtocolError(f"a segment comes with 1 descriptor, not {len(fds)}")
        if not passed.direct:
            self._staging.check_packs()
        mapping = await process.segments.add(passed, fds.pop())
        if not mapping.sealed:
            log.info("segment.unsealed", engine_id=process.engine_id, segment_id=passed.segment_id)
        return SegmentPassed(sealed=mapping.sealed)

    async def import_cuda(self, process: EngineProcess, passed: PassCuda) -> Empty:
        """Open memory of a GPU, and have slots for that GPU.

        Raises `SegmentError`, and `ConfigError` without slots.
        """
        process.segments.check_new(passed.segment_id, passed.device)
        await self._staging.make(passed.device)
        await process.segments.add_cuda(passed)
        return Empty()
