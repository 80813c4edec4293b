"""A fetch table in a world that answers each of its commands once, and checks what it commands.

Refuses to choose what happens next: the rules of the state machine on top of it do.
"""

from dataclasses import dataclass

import msgspec
import pytest

from kvbus.protocol import Granted
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.state import FetchLimits, FetchState
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.fetch.transitions import TRANSITIONS
from tests.decode.watched import Watched, blocks, ticket_of, token_of
from tests.decode.watched_turns import WatchedTurns
from tests.stories import StoryMachine

LIMITS = FetchLimits(
    max_fetches=8,
    num_places=2,
    patience_s=1.5,
    max_retired=8,
    lease_s=2.0,
    request_timeout_s=1.0,
    busy_retry_s=0.25,
    claim_after_s=0.25,
    confirm_grace_s=0.5,
)
Asked = (
    ev.SendMeet
    | ev.ResolvePeer
    | ev.SendClaim
    | ev.SendRenew
    | ev.ReadChunk
    | ev.SendConfirm
    | ev.SendTake
)
YES = {ev.SendConfirm, ev.SendTake}


@dataclass
class Pending:
    """A command that waits for its answer, and the grant if the prefill agent has decided on it."""

    sent_at: float
    asked: Asked
    granted: Granted | None = None


class FetchWorld(StoryMachine):
    """The table, the time, what is under way, and what was seen of every fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FetchTable(LIMITS)
        self.now = 0.0
        self.seen: dict[str, Watched] = {}
        self.turns = WatchedTurns(LIMITS.num_places, LIMITS.patience_s)
        self.pending: list[Pending] = []
        self.cause: ev.Event = ev.DeadlinePassed()
        self.draining = False
        self.num_requests = 0
        self.num_events = 0
        self.last_epoch = 0

    def tables(self) -> tuple[FetchTable]:
        return (self.table,)

    def is_kept(self, fetch_id: str) -> bool:
        return fetch_id in self.table.live or fetch_id in self.table.retired

    def is_full(self) -> bool:
        return self.draining or len(self.table.live) >= LIMITS.max_fetches

    def tell_hint(self, fetch_id: str) -> None:
        self.tell(ev.DeadlinePassed())
        if fetch_id in self.seen:
            self.seen[fetch_id].hinted = True
        self.tell(ev.OfferAdvanced(fetch_id))

    def grant(self, asked: Asked) -> Granted:
        watched = self.seen[asked.fetch_id]
        if isinstance(asked, ev.SendRenew):
            return watched.offer.granted(asked.epoch, asked.known_blocks.get("full", 0))
        self.last_epoch += 1
        return watched.offer.granted(self.last_epoch, 0)

    def tell_granted(self, pending: Pending, granted: Granted, lie: str = "") -> None:
        """The truth, or what the prefill agent may not say any more: that fails a live fetch."""
        fetch_id, watched = pending.asked.fetch_id, self.seen[pending.asked.fetch_id]
        renewed = isinstance(pending.asked, ev.SendRenew)
        claimed = None if renewed else ticket_of(fetch_id, watched.agent_boot)
        bends = watched.listens and (renewed or lie != "another epoch")
        if watched.in_doubt:  # the seal is not told yet, so it cannot be taken back
            bends &= lie == "another epoch" or (granted.sealed and lie != "open again")
        told = self.bent(granted, lie, watched) if bends else granted
        watched.is_told(pending.sent_at, told)
        self.tell(ev.LeaseGranted(fetch_id, pending.sent_at, told, claimed))
        assert told is granted or watched.report is not None, f"took over {lie}"

    def bent(self, granted: Granted, lie: str, watched: Watched) -> Granted:
        if lie == "gap" and watched.told_blocks:
            first = watched.told_blocks + 1
            return msgspec.structs.replace(granted, tables={"full": blocks(first, first + 1)})
        if lie == "fewer tokens" and watched.told_ready:
            return msgspec.structs.replace(granted, num_tokens=watched.told_ready - 1)
        if lie == "open again" and watched.told_sealed:
            return msgspec.structs.replace(granted, sealed=False)
        if lie == "another epoch":
            self.last_epoch += 1
            watched.superseded.add(granted.epoch)
            epoch = self.last_epoch
            return msgspec.structs.replace(granted, epoch=epoch, token=token_of(epoch))
        return granted

    def pick(self, back: int) -> str:
        """One of the last fetches, or one that never was."""
        fetch_ids = list(self.seen)[-4:]
        return fetch_ids[-1 - back] if back < len(fetch_ids) else "never"

    def reply_to(self) -> str:
        self.num_requests += 1
        return f"reply-{self.num_requests}"

    def tell(self, event: ev.Event) -> list[ev.Command]:
        with self.telling():
            return self.tell_and_check(event)

    def tell_and_check(self, event: ev.Event) -> list[ev.Command]:
        states = {f: fetch.state for f, fetch in self.table.live.items()}
        due = self.table.next_deadline()
        self.cause = event
        self.see_arrival(event)

        commands = self.table.handle(event, self.now)

        self.num_events += 1
        for command in commands:
            self.obey(command)
        answers = [c.reply_to for c in commands if isinstance(c, ev.SendReply | ev.Refuse)]
        assert answers == ([event.reply_to] if hasattr(event, "reply_to") else [])
        self.check_turns()
        for watched in self.seen.values():
            assert watched.report or self.now < self.ends_at(watched), "reported by its deadline"
        for fetch_id, watched in self.seen.items():
            asked = self.asked_of(fetch_id)
            is_idle = not (asked or watched.report or watched.granted or self.turns.waits(fetch_id))
            assert not is_idle or self.table.live[fetch_id].ask_again_at, "waits for nothing"
            is_asking = bool(asked & {ev.SendClaim, ev.SendRenew})
            watched.check_idle(is_asking=is_asking or self.is_asked_soon(watched))
        if due is None or due > self.now or isinstance(event, ev.DeadlinePassed):
            self.check_declared(event, states)
        return commands

    def check_declared(self, event: ev.Event, states: dict[str, FetchState]) -> None:
        """Only the states that the table of transitions declares, and only where it applies."""
        hit = getattr(event, "fetch_id", None)
        for fetch_id, state in states.items():
            after = self.state_of(fetch_id)
            is_hit = hit == fetch_id or (hit is None and after is not state)
            allowed = {state}
            if is_hit and not isinstance(event, ev.Requested):
                allowed = set(TRANSITIONS[state, type(event)].to)
            if FetchState.QUEUED in {
                state,
                *allowed,
            }:  # its turn may come by any event, and at once
                allowed |= set(TRANSITIONS[FetchState.QUEUED, ev.TurnCame].to)
            assert after in allowed

    def see_arrival(self, event: ev.Event) -> None:
        """From here on the fetch waits for its turn."""
        watched = self.seen.get(getattr(event, "fetch_id", ""))
        if watched is None or watched.report is not None:
            return
        is_new = event is watched.requested and watched.requested.route is not None
        if is_new or isinstance(event, ev.PeerReady):
            watched.queued_at = self.now
            self.turns.wait(watched.agent_boot, watched.requested.fetch_id)

    def check_turns(self) -> None:
        """A fetch is active while a claim, a read or a confirm is under way."""
        ended = {fetch_id for fetch_id, watched in self.seen.items() if watched.report}
        steps = ev.SendClaim | ev.SendConfirm | ev.SendTake
        active = {p.asked.fetch_id for p in self.pending if isinstance(p.asked, steps)}
        active |= {fetch_id for fetch_id, watched in self.seen.items() if watched.in_flight}
        self.turns.settle(self.now, active=active - ended)
        self.turns.check()

    def state_of(self, fetch_id: str) -> FetchState | None:
        fetch = self.table.live.get(fetch_id) or self.table.retired.get(fetch_id)
        return fetch.state if fetch else None

    def obey(self, command: ev.Command) -> None:
        match command:
            case ev.ReportLanded(fetch_id, num_tokens):
                self.seen[fetch_id].is_landed(num_tokens)
            case ev.ReportFetched() as report:
                watched = self.seen[report.fetch_id]
                self.check_end(watched, report)
                watched.end(report, self.now)
                self.turns.leave(watched.agent_boot, report.fetch_id)
            case ev.SendRelease(ticket, epoch, token):
                watched = self.seen[ticket.offer_id]
                assert not watched.in_flight, "given back under a read"
                assert epoch in watched.granted - watched.given_back
                assert token == token_of(epoch)
                watched.given_back.add(epoch)
            case ev.ReportBlocksFreed(fetch_id, engine_id):
                watched = self.seen[fetch_id]
                assert watched.requested.engine_id == engine_id
                assert not watched.in_flight, "blocks are free while bytes can land"
                assert watched.report is not None
                assert not watched.report.blocks_free
                assert not watched.blocks_freed, "freed twice"
                watched.blocks_freed = True
            case ev.StopRead(fetch_id):
                watched = self.seen[fetch_id]
                watched.num_aborts += 1
                assert watched.in_flight
                assert watched.num_aborts == 1
            case ev.SendReply() | ev.Refuse() | ev.SendWithdraw() | ev.SendForgo():
                pass
            case ev.HoldPeer(fetch_id):
                assert self.turns.waits(fetch_id)
                assert not self.asked_of(fetch_id)
            case _:
                self.ask(command)

    def ask(self, command: Asked) -> None:
        watched = self.seen[command.fetch_id]
        assert watched.report is None, "an ended fetch asks for nothing"
        assert type(command) not in self.asked_of(command.fetch_id), "asked twice at a time"
        if isinstance(command, ev.SendRenew | ev.SendConfirm):
            assert command.epoch in watched.granted - watched.given_back
            assert command.token == token_of(command.epoch)
        if self.turns.waits(command.fetch_id):
            begins = (ev.ReadChunk, ev.SendTake) if watched.requested.ahead else ()
            assert isinstance(command, (ev.SendClaim, *begins)), "it has not begun"
            self.turns.begin(watched.agent_boot, command.fetch_id, self.now)
            watched.begun_at = self.now
        if isinstance(command, ev.SendClaim | ev.SendRenew):
            self.check_question(command, watched)
        if isinstance(command, ev.SendConfirm):
            watched.ask_confirm()
        if isinstance(command, ev.SendTake):
            assert ev.SendClaim not in self.asked_of(command.fetch_id), "a lease is on its way"
            watched.ask_take(command)
        if isinstance(command, ev.ReadChunk):
            watched.start_chunk(command, self.now)
        elif type(command) in YES:
            left_s = watched.deadline - self.now
            assert left_s > 0, "asked for a yes after the deadline"
            is_last = LIMITS.request_timeout_s >= left_s
            wanted_s = left_s + LIMITS.confirm_grace_s if is_last else LIMITS.request_timeout_s
            assert command.timeout_s == pytest.approx(wanted_s)
        else:
            assert 0 < command.timeout_s <= LIMITS.request_timeout_s
        self.pending.append(Pending(self.now, command))

    def ends_at(self, watched: Watched) -> float:
        """Its deadline, and a little more while it waits for a yes that it asked for before."""
        is_asked = bool(YES & self.asked_of(watched.requested.fetch_id))
        return watched.deadline + (LIMITS.confirm_grace_s if is_asked else 0.0)

    def check_end(self, watched: Watched, report: ev.ReportFetched) -> None:
        """Time alone ends it no earlier; it is told that nobody has answered for the yes."""
        if isinstance(self.cause, ev.DeadlinePassed) and watched.confirm_asked:
            assert self.now >= self.ends_at(watched), "gave up a yes that was on its way"
        if YES & self.asked_of(report.fetch_id):
            assert report.undecided, "nobody has answered"
        if report.undecided:
            assert watched.confirm_asked, "it was not asked"
            assert report.error is not None, "it was answered"

    def asked_of(self, fetch_id: str) -> set[type[Asked]]:
        return {type(p.asked) for p in self.pending if p.asked.fetch_id == fetch_id}

    def is_asked_soon(self, watched: Watched) -> bool:
        """A renewal that found its agent busy is asked again after a pause."""
        due = self.table.next_deadline()
        return watched.asks_by is not None and due is not None and due <= watched.asks_by

    def check_question(self, question: ev.SendClaim | ev.SendRenew, watched: Watched) -> None:
        """No renewal without a reason: a hint since the last question, time, or one that failed."""
        if isinstance(question, ev.SendRenew):
            again = isinstance(self.cause, ev.RenewFailed)
            assert again or watched.hinted or self.now >= watched.renew_at, "a needless renewal"
            told_blocks = 0 if watched.in_doubt else watched.told_blocks
            assert question.known_blocks.get("full", 0) == told_blocks
        watched.hinted, watched.asks_by = False, None
