"""All fetches of one decode agent: admission, deadlines, and the dispatch of events (sans-IO)."""

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.message import Empty
from kvbus.protocol.ticket import Ticket
from kvbus.table import Context, Table
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchEntry, FetchLimits, FetchState
from kvbus_decode.fetch.transitions import TRANSITIONS, Commands


class FetchTable(Table[str, FetchEntry, FetchLimits, ev.Command]):
    """All fetches of one agent, by fetch id.

    ``live`` are those that have not ended or whose blocks are not free yet. Refuses more fetches
    than the limit, and a fetch id that was used already.
    """

    transitions = TRANSITIONS

    def __init__(self, limits: FetchLimits | None = None) -> None:
        limits = limits or FetchLimits()
        super().__init__(limits, max_retired=limits.max_retired)
        self.draining = False

    def _handle(self, event: ev.Event, now: float) -> Commands:
        if isinstance(event, ev.Requested):
            try:
                return self._request(event, now)
            except KVBusError as error:
                return [ev.Refuse(event.reply_to, error)]
        if isinstance(event, ev.TableEvent):
            self.draining |= isinstance(event, ev.DrainStarted | ev.Stopped)
            return self._apply_all(self._hit_by(event), event, now)
        fetch = self.find(event.fetch_id)
        return _answer_forgotten(event) if fetch is None else self._apply(fetch, event, now)

    def num_in(self, state: FetchState) -> int:
        """Fetches in ``state`` now."""
        return sum(fetch.state is state for fetch in self.live.values())

    def num_quarantined_blocks(self) -> int:
        """Blocks of ended fetches that a read can still write into."""
        draining = (f for f in self.live.values() if f.state is FetchState.DRAINING)
        return sum(len(table) for f in draining for table in f.requested.tables.values())

    def _request(self, event: ev.Requested, now: float) -> Commands:
        """Admit a fetch; raises `LocalError`."""
        if self.draining:
            raise LocalError("the agent is draining", code=ErrorCode.DRAINING)
        if self.find(event.fetch_id) is not None:
            raise LocalError(
                f"fetch '{event.fetch_id}' exists already",
                code=ErrorCode.FETCH_EXISTS,
                fetch_id=event.fetch_id,
            )
        if len(self.live) >= self.limits.max_fetches:
            raise LocalError(
                f"{len(self.live)} fetches are live, which is the limit",
                code=ErrorCode.BUSY,
                max_fetches=self.limits.max_fetches,
            )
        fetch = FetchEntry(event, deadline=now + event.timeout_s, entered_at=now)
        timeout_s = fetch.request_timeout_s(Context(now, self.limits))
        reply = ev.SendReply(event.reply_to, Empty())
        commands: Commands = [reply, ev.ResolvePeer(event.fetch_id, timeout_s, event)]
        if event.route is not None:  # the peer waits for the claim, the engine not for the reply
            fetch.state = FetchState.CLAIMING
            commands = [ev.SendClaim(event.fetch_id, timeout_s, event), reply]
        self._add(fetch, event, now, commands)
        return commands

    def _hit_by(self, event: ev.TableEvent) -> list[FetchEntry]:
        match event:
            case ev.PeerGone(agent_boot):
                return [
                    f
                    for f in list(self.live.values())
                    if f.requested.ticket.agent_boot == agent_boot
                ]
            case ev.EngineLost(engine_id):
                return [f for f in list(self.live.values()) if f.requested.engine_id == engine_id]
            case ev.Stopped():
                return list(self.live.values())
        return []


def _answer_forgotten(event: ev.FetchEvent) -> Commands:
    """What can still be done for a fetch that never was, or that was forgotten since."""
    match event:
        case ev.CancelRequested(fetch_id, reply_to):
            error = LocalError(f"no fetch '{fetch_id}'", code=ErrorCode.FETCH_UNKNOWN)
            return [ev.Refuse(reply_to, error)]
        case ev.LeaseGranted(granted=granted, claimed=Ticket() as ticket):
            return [ev.SendRelease(ticket, granted.epoch, granted.token, ErrorCode.CANCELLED)]
    return []
