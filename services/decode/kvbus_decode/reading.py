"""Carries out the reads of the fetch table: descriptors, the NIXL read, its end.

Refuses to decide: the end of a read goes back to the table as an event, exactly one for each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from kvbus.agent.guard import guarded
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.planning import Descriptors
from kvbus.transport import ReadOutcome, ReadStatus
from kvbus_decode import fetch_events as ev
from kvbus_decode.works import Work, Works

MAX_INLINE_DESCRIPTORS = 16_384


@dataclass(slots=True)
class _InFlight:
    """Fetches whose transfers can still write into one engine."""

    fetch_ids: set[str] = field(default_factory=set)
    none_left: anyio.Event = field(default_factory=anyio.Event)


class Reader:
    """Reads for the fetches in ``works``; ``dispatch`` takes the events of their ends."""

    def __init__(self, agent: Agent, works: Works, dispatch: Callable[[ev.Event], None]) -> None:
        self._agent, self._works, self._dispatch = agent, works, dispatch
        self._in_flight: dict[LocalEngine, _InFlight] = {}

    def start_read(self, command: ev.StartRead) -> None:
        """Post the READs of a fetch; large ones are planned in a thread."""
        work = self._works[command.fetch_id]
        self._in_flight.setdefault(work.engine, _InFlight()).fetch_ids.add(work.fetch_id)
        if _num_descriptors(work) > MAX_INLINE_DESCRIPTORS:
            self._agent.tasks.start_soon(self._plan_aside, work, command)
            return
        try:
            rows = _descriptors(work, command)
        except KVBusError as error:
            self._end_read(work, 0, error)
        else:
            self._post(work, rows)

    def abort_read(self, command: ev.AbortRead) -> None:
        """Post nothing more; the read's end follows."""
        work = self._works[command.fetch_id]
        work.aborted = True
        if work.read is not None:
            work.read.abort()

    async def reads_done(self, engine: LocalEngine) -> None:
        """Return when no transfer can write into ``engine`` any more."""
        in_flight = self._in_flight.get(engine)
        if in_flight is not None:
            await in_flight.none_left.wait()

    async def _plan_aside(self, work: Work, command: ev.StartRead) -> None:
        async def plan() -> None:
            self._post(work, await anyio.to_thread.run_sync(_descriptors, work, command))

        await guarded(plan, lambda error: self._end_read(work, 0, error))

    def _post(self, work: Work, rows: Descriptors) -> None:
        try:
            if work.aborted or work.route is None:
                raise LocalError("the fetch ended before its read", code=ErrorCode.CANCELLED)
            work.read = self._agent.transport.read(
                work.route.nixl_agent,
                rows.local,
                rows.remote,
                on_end=lambda outcome: self._on_read_end(work, outcome),
            )
        except LocalError as error:
            self._end_read(work, 0, error)

    def _on_read_end(self, work: Work, outcome: ReadOutcome) -> None:
        error: KVBusError | None = outcome.error
        if outcome.status is ReadStatus.ABORTED:
            error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
        self._end_read(work, outcome.num_bytes, error)

    def _end_read(self, work: Work, num_bytes: int, error: KVBusError | None) -> None:
        in_flight = self._in_flight[work.engine]
        in_flight.fetch_ids.discard(work.fetch_id)
        if not in_flight.fetch_ids:
            in_flight.none_left.set()
            del self._in_flight[work.engine]
        self._dispatch(ev.ReadEnded(work.fetch_id, num_bytes, error))


def _num_descriptors(work: Work) -> int:
    tokens = work.requested.num_tokens - work.requested.first_token
    return work.route.plan.num_descriptors(tokens) if work.route is not None else 0


def _descriptors(work: Work, command: ev.StartRead) -> Descriptors:
    requested = work.requested
    if work.route is None:
        raise LocalError("the fetch has no route", code=ErrorCode.INTERNAL)
    try:
        return work.route.plan.descriptors(
            command.tables,
            requested.tables,
            start=requested.first_token,
            stop=requested.num_tokens,
        )
    except (IndexError, KeyError) as error:
        raise GeometryError(f"the offer's block tables do not hold its tokens: {error}") from error
