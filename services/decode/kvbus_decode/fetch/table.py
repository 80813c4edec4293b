"""Table of all fetches: admission, deadlines and dispatch (sans-IO)."""

from kvbus.errors import ErrorCode, LocalError
from kvbus.fair import FairPool
from kvbus.protocol.peer import Acquire, Granted
from kvbus.table.events import DrainStarted, EngineLost, Refuse, Stopped
from kvbus.table.table import Context, Table
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchEntry, FetchLimits, FetchState
from kvbus_decode.fetch.transitions import (
    TRANSITIONS,
    Commands,
    release,
    resolve,
    send_request,
    start,
)


class FetchTable(Table[str, FetchEntry, FetchLimits, ev.Command]):
    """All fetches by key; ``live`` ones have not ended, or still drain."""

    transitions = TRANSITIONS

    def __init__(self, limits: FetchLimits | None = None) -> None:
        limits = limits or FetchLimits()
        super().__init__(limits, max_retired_bytes=limits.max_retired_bytes)
        self.draining = False
        self._places: FairPool[str] = FairPool(limits.num_places, may_have=lambda *_: True)

    # Depth first: the first of many fetches end early, and no lease waits for its read.
    #
    #   requested ─▶ resolving ─▶ queued ─ place ─▶ acquiring ─▶ reading ─▶ committing ─▶ end
    #   └▶ awaiting ─▶┘           agent by agent         └─▶ waiting ─▶ ┘  (no place from here on)
    #
    # A failed attempt returns to resolving through retrying; see `retry_or_fail`.
    #
    # Places limit how many fetches begin. A fetch releases its place
    #   - when it ends, though its blocks may still drain;
    #   - when it waits for an offer that grows or has another reader;
    #   - after `place_timeout_s`, as its prefill agent may be stopped.
    # It continues without a place. Prefill agents get places in turn, so a stopped agent has few
    # places, for a short time. Fetches with a higher priority come first, but not in every turn.
    def _handle(self, event: ev.Event, now: float) -> Commands:
        if isinstance(event, ev.FetchEvent):
            fetch = self.find(event.fetch_id)
            if fetch is None or getattr(event, "attempt", fetch.attempts) != fetch.attempts:
                commands = _answer_late(event)
            else:
                commands = self._apply(fetch, event, now)
        elif isinstance(event, ev.Requested):
            commands = self._request(event, now)
        else:
            self.draining |= isinstance(event, DrainStarted | Stopped)
            commands = self._apply_all(self._ended_by(event), event, now)
        while self._places and (granted := self._places.acquire()) is not None:
            fetch = self.live[granted[0]]
            fetch.place, fetch.place_until = granted[1], now + self.limits.place_timeout_s
            commands += self._apply(fetch, ev.TurnCame(fetch.key), now)
        return commands

    def num_in(self, state: FetchState) -> int:
        return sum(fetch.state is state for fetch in self.live.values())

    def num_quarantined_blocks(self) -> int:
        draining = (f for f in self.live.values() if f.state is FetchState.DRAINING)
        return sum(len(table) for f in draining for table in f.requested.request.tables.values())

    def called(self, name: str) -> list[FetchEntry]:
        return [one for one in self.named(name) if one.requested.request.fetch_id == name]

    def _names_of(self, entry: FetchEntry) -> tuple[str, ...]:
        requested, rendezvous = entry.requested, entry.requested.rendezvous
        names = {requested.ticket.request_id, requested.request.fetch_id}
        if rendezvous is not None:
            names |= {rendezvous.transfer_id, rendezvous.request_id}
        return tuple(names - {""})

    def _refusal(self, event: ev.Requested) -> LocalError | None:
        num_live, name = len(self.live), event.request.fetch_id
        if self.draining:
            return LocalError("the agent is draining", code=ErrorCode.DRAINING)
        if self.find(event.fetch_id) is not None:
            message, code = f"fetch '{name}' exists already", ErrorCode.FETCH_EXISTS
            return LocalError(message, code=code, fetch_id=name)
        if num_live >= self.limits.max_fetches:
            message = f"{num_live} fetches are live, which is the limit"
            return LocalError(message, code=ErrorCode.BUSY, max_fetches=self.limits.max_fetches)
        return None

    def _request(self, event: ev.Requested, now: float) -> Commands:
        if (error := self._refusal(event)) is not None:
            return [Refuse(event.reply_to, error)]
        deadline, at = now + event.timeout_s, Context(now, self.limits)
        fetch = FetchEntry(
            requested=event,
            deadline=deadline,
            answer_until=deadline + self.limits.commit_grace_s,
            boot=event.boot or event.ticket.agent_boot,
            elsewhere=event.elsewhere,
            home_nixl=event.nixl_agent,
            state=FetchState.QUEUED,
            entered_at=now,
        )
        commands: Commands = [ev.AcquirePeer(event, fetch.attempts, deadline)]
        if event.request.repeated:
            fetch.state, fetch.repeated = FetchState.COMMITTING, True
            if event.remote_ranks:
                fetch.remote_parts_read = True
                commands.append(ev.EndEarlierParts(fetch.requested))
            else:
                commands.append(send_request(fetch, at))
        elif not event.has_ticket:
            fetch.state = FetchState.AWAITING
            commands.append(send_request(fetch, at))
        elif not event.has_route:
            fetch.state, commands = FetchState.RESOLVING, [resolve(fetch, at)]
        elif (place := self._places.acquire_at_once(fetch.turn.owner)) is None:
            self._places.add(fetch.turn, fetch.key)
        else:
            fetch.place, fetch.place_until = place, now + self.limits.place_timeout_s
            commands += start(fetch, event, at)
            self._release_place(fetch, now)
        self._add(fetch, event, now, commands)
        return commands

    def _ended_by(self, event: object) -> list[FetchEntry]:
        live = self.live.values()
        if isinstance(event, EngineLost):
            return [one for one in live if one.requested.engine_id == event.engine_id]
        return list(live) if isinstance(event, Stopped) else []

    def _apply(self, entry: FetchEntry, event: object, now: float) -> Commands:
        was_queued = entry.state is FetchState.QUEUED
        commands = super()._apply(entry, event, now)
        is_queued = entry.state is FetchState.QUEUED
        if is_queued and not was_queued:
            self._places.add(entry.turn, entry.key)
        elif was_queued and not is_queued and entry.place is None:
            self._places.discard(entry.turn, entry.key)
        if self._release_place(entry, now) and not entry.is_over:
            self.deadlines.set(entry.key, entry.due_at)
        return commands

    def _release_place(self, fetch: FetchEntry, now: float) -> bool:
        if fetch.place is None or fetch.makes_progress(now):
            return False
        self._places.release(fetch.place)
        fetch.place = None
        return True


def _answer_late(event: ev.FetchEvent) -> Commands:
    match event:
        case ev.CancelRequested(fetch_id, reply_to) if reply_to is not None:
            error = LocalError(f"no fetch '{fetch_id}'", code=ErrorCode.FETCH_UNKNOWN)
            return [Refuse(reply_to, error)]
        case ev.Answered(message=Acquire(agent_boot=boot), outcome=Granted() as granted):
            return [release(event.ticket, boot, granted, ErrorCode.CANCELLED)]
    return []
