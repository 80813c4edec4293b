"""Takes the memory that an engine process passes on the attach socket.

Refuses memory that is staged only where the agent has no slots: nobody could ever read it.
"""

import structlog

from kvbus.agent.local_engine import EngineProcess
from kvbus.agent.staging import StagingMemory, staging_of
from kvbus.errors import ProtocolError
from kvbus.protocol.engine import PassSegment, SegmentPassed

log = structlog.get_logger()


class MemoryIntake:
    """Maps what is passed; ``staging`` are the slots that staged memory needs."""

    def __init__(self, staging: StagingMemory | None) -> None:
        self._staging = staging

    async def take_segment(
        self, process: EngineProcess, passed: PassSegment, fds: list[int]
    ) -> SegmentPassed:
        """Map the one descriptor of ``fds``, and take it out of there.

        Raises `ProtocolError`, `SegmentError`, and `LocalError` (``config``) without slots.
        """
        if len(fds) != 1:
            raise ProtocolError(f"a segment comes with 1 descriptor, not {len(fds)}")
        if not passed.direct:
            staging_of(self._staging)
        mapping = await process.segments.add(passed, fds.pop())
        if not mapping.sealed:
            log.warning(
                "segment.unsealed", engine_id=process.engine_id, segment_id=passed.segment_id
            )
        return SegmentPassed(sealed=mapping.sealed)
