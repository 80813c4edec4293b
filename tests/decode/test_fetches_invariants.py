"""The fetch table in an environment that answers late, out of order, and with any error.

The environment keeps the one promise that the agent makes to the table: each command that asks for
an answer gets exactly one. What the table says is checked where it comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus.errors import ErrorCode, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome
from kvbus.protocol.peer import Granted
from kvbus.protocol.ticket import Ticket
from kvbus_decode import fetch_events as ev
from kvbus_decode.fetch import FetchLimits, FetchState
from kvbus_decode.fetches import FetchTable
from kvbus_decode.transitions import TRANSITIONS

LIMITS = FetchLimits(
    max_fetches=3, max_tombstones=3, lease_s=2.0, request_timeout_s=1.0, busy_retry_s=0.25
)
ENGINES = st.sampled_from(["engine-a", "engine-b"])
BOOTS = st.sampled_from(["boot-a", "boot-b"])
ANY_FETCH = st.sampled_from([0, 0, 1, 1, 2, 3, 4])
ANY_PENDING = st.sampled_from([0, 0, 0, 1, 2, 5])
MAYBE_ERROR = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.sampled_from([ErrorCode.BUSY, ErrorCode.TIMEOUT]),
    st.sampled_from(ErrorCode),
)
Asked = ev.ResolvePeer | ev.SendClaim | ev.SendRenew | ev.StartRead | ev.SendConfirm


def rarely(one_in: int) -> Callable[[Any], Any]:
    """Enables a rule that ends much at once in one of ``one_in`` steps only."""
    return precondition(lambda self: self.num_events % one_in == one_in - 1)


@dataclass
class Watched:
    """What was seen of one fetch from outside; ``granted`` and ``given_back`` are epochs."""

    deadline: float
    engine_id: str
    agent_boot: str
    num_tokens: int
    num_known_blocks: int = 0
    granted: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)
    in_flight: bool = False
    all_landed: bool = False
    confirmed_after_landing: bool = False
    num_aborts: int = 0
    cancelled: bool = False
    report: ev.ReportFetched | None = None
    blocks_freed: bool = False


def ticket_of(fetch_id: str, boot: str) -> Ticket:
    """Each fetch has an offer of its own, under its own name."""
    return Ticket("p", boot, "tcp://p", "engine-p", "e-boot", fetch_id, "request", 32)


class FetchInterleavings(RuleBasedStateMachine):
    """Rules are what the engine, the peer, the fabric and the clock can do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FetchTable(LIMITS)
        self.now = 0.0
        self.seen: dict[str, Watched] = {}
        self.pending: list[tuple[float, Asked]] = []
        self.draining = False
        self.num_requests = 0
        self.num_events = 0
        self.last_epoch = 0

    # The environment.

    @rule(
        engine_id=ENGINES,
        boot=BOOTS,
        num_tokens=st.sampled_from([0, 32, 32, 32]),
        timeout_s=st.sampled_from([60.0, 60.0, 3.0, 0.5]),
        again=st.sampled_from([None, None, None, 0, 1, 3]),
    )
    def request(
        self, engine_id: str, boot: str, num_tokens: int, timeout_s: float, again: int | None
    ) -> None:
        self.tell(ev.DeadlinePassed())
        fetch_id = f"fetch-{len(self.seen)}" if again is None else self.pick(again)
        kept = fetch_id in self.table.fetches or fetch_id in self.table.tombstones
        if kept or (fetch_id not in self.seen and self.is_refused()):
            known, watched = fetch_id in self.seen, self.seen.get(fetch_id)
        elif fetch_id in self.seen or self.is_refused():
            return
        else:
            known, watched = False, Watched(self.now + timeout_s, engine_id, boot, num_tokens)
            self.seen[fetch_id] = watched
        ticket = ticket_of(fetch_id, boot)
        event = ev.Requested(
            fetch_id, engine_id, ticket, 32 - num_tokens, 32, {}, timeout_s, self.reply_to()
        )

        (answer, *rest) = self.tell(event)

        refused = isinstance(answer, ev.Refuse)
        assert refused == (known or watched is None)
        assert [type(c) for c in rest] == ([] if refused else [ev.ResolvePeer])

    def is_refused(self) -> bool:
        return self.draining or len(self.table.fetches) >= LIMITS.max_fetches

    @precondition(lambda self: self.pending)
    @rule(which=ANY_PENDING, sealed=st.booleans())
    def answer_well(self, which: int, sealed: bool) -> None:
        self.answer(which=which, code=None, sealed=sealed, lease_s=2.0, num_tokens=32, gap=0)

    @precondition(lambda self: self.pending)
    @rule(
        which=ANY_PENDING,
        code=MAYBE_ERROR,
        sealed=st.sampled_from([True, True, False]),
        lease_s=st.sampled_from([0.25, 2.0, 2.0]),
        num_tokens=st.sampled_from([32, 32, 32, 16]),
        gap=st.sampled_from([0, 0, 0, 1]),
    )
    def answer(
        self,
        *,
        which: int,
        code: ErrorCode | None,
        sealed: bool,
        lease_s: float,
        num_tokens: int,
        gap: int,
    ) -> None:
        sent_at, asked = self.pending.pop(which % len(self.pending))
        error = None if code is None else RemoteError("any", code=code)
        fetch_id, watched = asked.fetch_id, self.seen[asked.fetch_id]
        match asked:
            case ev.StartRead():
                self.tell(ev.DeadlinePassed())
                watched.in_flight = False
                watched.all_landed = error is None
                self.tell(ev.ReadEnded(fetch_id, 4096, error))
            case ev.SendRenew() if error is not None:
                self.tell(ev.RenewFailed(fetch_id, error))
            case _ if error is not None:
                self.tell(ev.StepFailed(fetch_id, error))
            case ev.ResolvePeer():
                self.tell(ev.PeerReady(fetch_id))
            case ev.SendConfirm():
                watched.confirmed_after_landing = watched.all_landed or not watched.num_tokens
                self.tell(ev.LeaseConfirmed(fetch_id))
            case ev.SendClaim() | ev.SendRenew():
                self.last_epoch += isinstance(asked, ev.SendClaim)
                epoch = asked.epoch if isinstance(asked, ev.SendRenew) else self.last_epoch
                tables = {"full": BlockTable.of([1], first_block=watched.num_known_blocks + gap)}
                watched.num_known_blocks += 1
                watched.granted.add(epoch)
                granted = Granted(epoch, lease_s, num_tokens, sealed, tables)
                claimed = ticket_of(fetch_id, watched.agent_boot)
                if isinstance(asked, ev.SendRenew):
                    claimed = None
                self.tell(ev.LeaseGranted(fetch_id, sent_at, granted, claimed))

    @rarely(3)
    @rule(back=ANY_FETCH)
    def hint(self, back: int) -> None:
        self.tell(ev.OfferAdvanced(self.pick(back)))

    @rarely(5)
    @rule(back=ANY_FETCH)
    def cancel(self, back: int) -> None:
        self.tell(ev.DeadlinePassed())
        fetch_id = self.pick(back)
        kept = fetch_id in self.table.fetches or fetch_id in self.table.tombstones
        if kept and self.seen[fetch_id].report is None:
            self.seen[fetch_id].cancelled = True

        (answer, *_) = self.tell(ev.CancelRequested(fetch_id, self.reply_to()))

        assert isinstance(answer, ev.Reply) == kept

    @rarely(11)
    @rule(boot=BOOTS)
    def lose_peer(self, boot: str) -> None:
        self.tell(ev.PeerLost(boot))
        assert all(w.report for w in self.seen.values() if w.agent_boot == boot)

    @rarely(13)
    @rule(engine_id=ENGINES)
    def lose_engine(self, engine_id: str) -> None:
        self.tell(ev.EngineLost(engine_id))
        assert all(w.report for w in self.seen.values() if w.engine_id == engine_id)

    @rarely(31)
    @rule(stop=st.booleans())
    def drain_or_stop(self, stop: bool) -> None:
        self.draining = True
        self.tell(ev.Stopped() if stop else ev.DrainStarted())
        assert not stop or all(w.report for w in self.seen.values())

    @rule(elapsed_s=st.sampled_from([0.125, 0.125, 0.25, 1.0, 5.0]))
    def pass_time_untold(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rarely(3)
    @rule()
    def pass_time_to_the_next_deadline(self) -> None:
        due = self.table.next_deadline()
        self.now = max(self.now, due if due is not None else self.now)
        self.tell(ev.DeadlinePassed())
        due = self.table.next_deadline()
        assert due is None or due > self.now, "handling what is due makes progress"

    # The checks.

    def pick(self, back: int) -> str:
        """One of the last fetches, or one that never was."""
        fetch_ids = list(self.seen)[-4:]
        return fetch_ids[-1 - back] if back < len(fetch_ids) else "never"

    def reply_to(self) -> str:
        self.num_requests += 1
        return f"reply-{self.num_requests}"

    def tell(self, event: ev.Event) -> list[ev.Command]:
        states = {f: fetch.state for f, fetch in self.table.fetches.items()}
        due = self.table.next_deadline()

        commands = self.table.handle(event, self.now)

        self.num_events += 1
        for command in commands:
            self.obey(command)
        answers = [c.reply_to for c in commands if isinstance(c, ev.Reply | ev.Refuse)]
        assert answers == ([event.reply_to] if hasattr(event, "reply_to") else [])
        for watched in self.seen.values():
            assert watched.report or self.now < watched.deadline, "reported by its deadline"
        if due is None or due > self.now or isinstance(event, ev.DeadlinePassed):
            self.check_declared(event, states)
        return commands

    def check_declared(self, event: ev.Event, states: dict[str, FetchState]) -> None:
        """Only the states that the table of transitions declares, and only where it applies."""
        hit = getattr(event, "fetch_id", None)
        for fetch_id, state in states.items():
            after = self.state_of(fetch_id)
            is_hit = hit == fetch_id or (hit is None and after is not state)
            if is_hit and not isinstance(event, ev.Requested):
                assert after in TRANSITIONS[state, type(event)].to
            else:
                assert after is state

    def state_of(self, fetch_id: str) -> FetchState | None:
        fetch = self.table.fetches.get(fetch_id) or self.table.tombstones.get(fetch_id)
        return fetch.state if fetch else None

    def obey(self, command: ev.Command) -> None:
        match command:
            case ev.ReportFetched() as report:
                self.check_report(report)
            case ev.SendRelease(ticket, epoch):
                watched = self.seen[ticket.offer_id]
                assert not watched.in_flight, "given back under a read"
                assert epoch in watched.granted - watched.given_back
                watched.given_back.add(epoch)
            case ev.ReportBlocksFreed(fetch_id, engine_id):
                watched = self.seen[fetch_id]
                assert watched.engine_id == engine_id
                assert not watched.in_flight, "blocks are free while bytes can land"
                assert watched.report is not None
                assert not watched.report.blocks_free
                assert not watched.blocks_freed, "freed twice"
                watched.blocks_freed = True
            case ev.AbortRead(fetch_id):
                watched = self.seen[fetch_id]
                watched.num_aborts += 1
                assert watched.in_flight
                assert watched.num_aborts == 1
            case ev.Reply() | ev.Refuse():
                pass
            case _:
                self.ask(command)

    def ask(self, command: Asked) -> None:
        watched = self.seen[command.fetch_id]
        assert watched.report is None, "an ended fetch asks for nothing"
        assert type(command) not in {
            type(asked) for _, asked in self.pending if asked.fetch_id == command.fetch_id
        }, "asked twice at a time"
        if isinstance(command, ev.SendRenew | ev.SendConfirm):
            assert command.epoch in watched.granted - watched.given_back
        if isinstance(command, ev.SendConfirm):
            assert not watched.in_flight
            assert watched.all_landed or watched.num_tokens == 0
        if isinstance(command, ev.StartRead):
            assert watched.granted
            assert not watched.in_flight
            watched.in_flight = True
        else:
            assert 0 < command.timeout_s <= LIMITS.request_timeout_s
        self.pending.append((self.now, command))

    def check_report(self, report: ev.ReportFetched) -> None:
        watched = self.seen[report.fetch_id]
        assert watched.report is None, "reported twice"
        assert report.blocks_free == (not watched.in_flight)
        assert (report.outcome is Outcome.CANCELLED) == watched.cancelled
        assert (report.outcome is Outcome.COMPLETED) == (report.error is None)
        if report.outcome is Outcome.COMPLETED:
            assert watched.confirmed_after_landing, "completed without the prefill agent's word"
        watched.report = report

    @invariant()
    def the_tables_are_bounded_and_hold_what_is_not_over(self) -> None:
        assert len(self.table.fetches) <= LIMITS.max_fetches
        assert len(self.table.tombstones) <= LIMITS.max_tombstones
        not_over = {f for f, w in self.seen.items() if w.report is None or w.in_flight}
        assert set(self.table.fetches) == not_over
        draining = sum(w.report is not None and w.in_flight for w in self.seen.values())
        assert self.table.num_in(FetchState.DRAINING) == draining

    @invariant()
    def somebody_will_look_at_every_fetch_by_its_deadline(self) -> None:
        deadlines = [w.deadline for w in self.seen.values() if w.report is None]
        due = self.table.next_deadline()
        assert (due is None) == (not deadlines)
        assert due is None or due <= min(deadlines)

    @invariant()
    def blocks_of_ended_fetches_are_freed_once_nothing_is_in_flight(self) -> None:
        for watched in self.seen.values():
            if watched.report is not None and not watched.in_flight:
                assert watched.blocks_freed == (not watched.report.blocks_free)

    def teardown(self) -> None:
        """In the end every fetch was reported and no lease of it is left."""
        self.pass_time_to_the_next_deadline()
        while self.pending or self.table.next_deadline() is not None:
            while self.pending:
                self.answer(
                    which=0, code=ErrorCode.BUSY, sealed=True, lease_s=2.0, num_tokens=32, gap=0
                )
            self.pass_time_to_the_next_deadline()

        assert not self.table.fetches
        for watched in self.seen.values():
            assert watched.report is not None
            ended = watched.given_back | (
                watched.granted if watched.confirmed_after_landing else set()
            )
            assert ended == watched.granted, "a lease was left to its expiry"


TestFetchInterleavings = FetchInterleavings.TestCase
TestFetchInterleavings.settings = settings(deadline=None, max_examples=600, stateful_step_count=50)
