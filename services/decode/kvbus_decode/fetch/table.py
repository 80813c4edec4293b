"""All fetches of one decode agent: admission, deadlines, and the dispatch of events (sans-IO).

Refuses clocks, sockets, logs and random numbers: events and times come in, commands come out.
Refuses more fetches than the limit, and a fetch id that was used already.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.message import Empty
from kvbus.protocol.ticket import Ticket
from kvbus.table.deadlines import Deadlines
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.context import Commands, Context
from kvbus_decode.fetch.entry import ENDS, FetchEntry, FetchLimits, FetchState
from kvbus_decode.fetch.transitions import TRANSITIONS


@dataclass(slots=True)
class FetchTable:
    """All fetches of one agent; `handle` is the only way to change anything.

    ``fetches`` holds those that have not ended or whose blocks are not free yet, ``tombstones`` the
    last ended ones, so that a late reply finds out what became of its fetch.
    """

    limits: FetchLimits = field(default_factory=FetchLimits)
    fetches: dict[str, FetchEntry] = field(default_factory=dict)
    tombstones: OrderedDict[str, FetchEntry] = field(default_factory=OrderedDict)
    draining: bool = False
    _deadlines: Deadlines[str] = field(default_factory=Deadlines)

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Apply ``event`` at time ``now`` and return what the agent has to do, in order."""
        due = self._check_time(now)
        self.draining |= isinstance(event, ev.DrainStarted | ev.Stopped)
        if isinstance(event, ev.Requested):
            return due + self._request(event, now)
        if isinstance(event, ev.TableEvent):
            return due + self._apply_all(self._hit_by(event), event, now)
        return due + self._dispatch(event, now)

    def next_deadline(self) -> float | None:
        """When to send `DeadlinePassed` at the latest, or None while nothing can be due."""
        return self._deadlines.next()

    def num_in(self, state: FetchState) -> int:
        """Fetches in ``state`` now."""
        return sum(fetch.state is state for fetch in self.fetches.values())

    def num_quarantined_blocks(self) -> int:
        """Blocks of ended fetches that a transfer can still write into."""
        draining = (f for f in self.fetches.values() if f.state is FetchState.DRAINING)
        return sum(len(table) for f in draining for table in f.requested.tables.values())

    def _request(self, event: ev.Requested, now: float) -> Commands:
        try:
            self._check_admission(event)
        except KVBusError as error:
            return [ev.Refuse(event.reply_to, error)]
        fetch = FetchEntry(event, deadline=now + event.timeout_s, entered_at=now)
        self.fetches[event.fetch_id] = fetch
        self._deadlines.set(event.fetch_id, fetch.deadline)
        timeout_s = Context(now, self.limits).timeout_s(fetch)
        return [
            ev.SendReply(event.reply_to, Empty()),
            ev.ResolvePeer(event.fetch_id, timeout_s, event),
        ]

    def _check_admission(self, event: ev.Requested) -> None:
        if self.draining:
            raise LocalError("the agent is draining", code=ErrorCode.DRAINING)
        if event.fetch_id in self.fetches or event.fetch_id in self.tombstones:
            raise LocalError(
                f"fetch '{event.fetch_id}' exists already",
                code=ErrorCode.FETCH_EXISTS,
                fetch_id=event.fetch_id,
            )
        if len(self.fetches) >= self.limits.max_fetches:
            raise LocalError(
                f"{len(self.fetches)} fetches are live, which is the limit",
                code=ErrorCode.BUSY,
                max_fetches=self.limits.max_fetches,
            )

    def _dispatch(self, event: ev.FetchEvent, now: float) -> Commands:
        fetch = self.fetches.get(event.fetch_id) or self.tombstones.get(event.fetch_id)
        if fetch is not None:
            return self._apply(fetch, event, now)
        return _answer_forgotten(event)

    def _apply(self, fetch: FetchEntry, event: ev.Event, now: float) -> Commands:
        transition = TRANSITIONS[fetch.state, type(event)]
        commands = transition.handler(fetch, event, Context(now, self.limits))
        when = fetch.next_deadline()
        if when is None:
            self._deadlines.discard(fetch.fetch_id)
        else:
            self._deadlines.set(fetch.fetch_id, when)
        if fetch.state in ENDS and fetch.fetch_id in self.fetches:
            self._retire(fetch)
        return commands

    def _hit_by(self, event: ev.TableEvent) -> list[FetchEntry]:
        match event:
            case ev.PeerGone(agent_boot):
                return [f for f in self._all() if f.requested.ticket.agent_boot == agent_boot]
            case ev.EngineLost(engine_id):
                return [f for f in self._all() if f.requested.engine_id == engine_id]
            case ev.Stopped():
                return self._all()
        return []

    def _all(self) -> list[FetchEntry]:
        return list(self.fetches.values())

    def _apply_all(self, hit: list[FetchEntry], event: ev.Event, now: float) -> Commands:
        return [command for fetch in hit for command in self._apply(fetch, event, now)]

    def _retire(self, fetch: FetchEntry) -> None:
        del self.fetches[fetch.fetch_id]
        fetch.tables = {}
        self.tombstones[fetch.fetch_id] = fetch
        while len(self.tombstones) > self.limits.max_tombstones:
            self.tombstones.popitem(last=False)

    def _check_time(self, now: float) -> Commands:
        due = [self.fetches[fetch_id] for fetch_id in self._deadlines.pop_due(now)]
        return self._apply_all(due, ev.DeadlinePassed(), now)


def _answer_forgotten(event: ev.FetchEvent) -> Commands:
    """What can still be done for a fetch that never was, or that the tombstones forgot."""
    match event:
        case ev.CancelRequested(fetch_id, reply_to):
            error = LocalError(f"no fetch '{fetch_id}'", code=ErrorCode.FETCH_UNKNOWN)
            return [ev.Refuse(reply_to, error)]
        case ev.LeaseGranted(granted=granted, claimed=Ticket() as ticket):
            return [ev.SendRelease(ticket, granted.epoch, ErrorCode.CANCELLED)]
    return []
