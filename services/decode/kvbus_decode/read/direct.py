"""The direct path: READs from the prefill engine's blocks straight into the decode engine's.

Refuses to compute many descriptors on the event loop: those are planned in a thread.
"""

import anyio

from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.planning import Descriptors
from kvbus.transport import ReadOutcome, ReadStatus
from kvbus_decode.peer.route import SourcePlan
from kvbus_decode.read.piece import Piece, PieceRead

MAX_INLINE_DESCRIPTORS = 16_384


class DirectReader:
    """Posts the READs of pieces."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def start(self, read: PieceRead) -> None:
        """Read a piece; each source is one part of it."""
        piece = read.piece
        for plan in piece.route.plans(piece.spread):
            read.begin()
            if plan.direct and plan.direct.num_descriptors(piece.spans) > MAX_INLINE_DESCRIPTORS:
                self._agent.tasks.start_soon(self._plan_aside, read, plan)
                continue
            try:
                rows = _descriptors(piece, plan)
            except KVBusError as error:
                read.end(0, error)
            else:
                self._post(read, plan, rows)

    async def _plan_aside(self, read: PieceRead, plan: SourcePlan) -> None:
        async def prepare() -> None:
            rows = await anyio.to_thread.run_sync(_descriptors, read.piece, plan)
            self._post(read, plan, rows)

        await guarded(prepare, lambda error: read.end(0, error))

    def _post(self, read: PieceRead, plan: SourcePlan, rows: Descriptors) -> None:
        if read.stopped or not len(rows.local):
            read.end()
            return
        try:
            transfer = self._agent.transport.read(
                plan.source.nixl_agent,
                rows.local,
                rows.remote,
                on_end=lambda outcome: read.end(outcome.num_bytes, read_error(outcome)),
            )
        except LocalError as error:
            read.end(0, error)
        else:
            read.on_stop(transfer.abort)


def read_error(outcome: ReadOutcome) -> KVBusError | None:
    """Why a READ did not bring all of its bytes; None when it did."""
    if outcome.status is ReadStatus.ABORTED:
        return LocalError("the read was aborted", code=ErrorCode.CANCELLED)
    return outcome.error


def _descriptors(piece: Piece, plan: SourcePlan) -> Descriptors:
    if plan.direct is None:
        raise LocalError("the memory of one side is staged only", code=ErrorCode.CONFIG)
    try:
        return plan.direct.descriptors(piece.source, piece.target, piece.spans)
    except (IndexError, KeyError) as error:
        raise GeometryError(f"the offer's block tables do not hold its tokens: {error}") from error
