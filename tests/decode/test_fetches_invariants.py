"""The fetch table in an environment that answers late, out of order, and with any error.

The environment keeps the one promise that the agent makes to the table: each command that asks for
an answer gets exactly one. What the table says is checked where it comes out.
"""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from kvbus.errors import ErrorCode, RemoteError
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.ahead import Ahead
from kvbus_decode.fetch.state import FetchState
from tests.decode.fetch_world import LIMITS, FetchWorld, Pending
from tests.decode.watched import (
    NUM_TOKENS,
    Offered,
    Watched,
    blocks,
    num_blocks,
    rendezvous_of,
    ticket_of,
)
from tests.examples import num_examples, rarely

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
TICKET_TABLES = {"full": blocks(0, num_blocks(NUM_TOKENS))}
AHEAD = st.sampled_from(
    [None, Ahead(TICKET_TABLES, claims=False), Ahead(TICKET_TABLES, claims=True)]
)
LIES = st.sampled_from(["gap", "fewer tokens", "open again", "another epoch"])


class FetchInterleavings(FetchWorld):
    """Rules are what the engine, the peer, the fabric and the clock can do."""

    @rule(
        engine_id=ENGINES,
        boot=BOOTS,
        first_token=st.sampled_from([0, 0, 12, NUM_TOKENS]),
        has_state=st.booleans(),
        chunk_tokens=st.sampled_from([0, 8, 12]),
        num_ready=st.sampled_from([0, 8, 20, NUM_TOKENS]),
        sealed=st.booleans(),
        timeout_s=st.sampled_from([60.0, 60.0, 60.0, 3.0, 0.5]),
        again=st.sampled_from([None, None, None, 0, 1, 3]),
        route=st.sampled_from([None, "known"]),
        ahead=AHEAD,
        meets=st.sampled_from([False, False, True]),
    )
    def request(
        self,
        *,
        engine_id: str,
        boot: str,
        first_token: int,
        has_state: bool,
        chunk_tokens: int,
        num_ready: int,
        sealed: bool,
        timeout_s: float,
        again: int | None,
        route: str | None,
        ahead: Ahead | None,
        meets: bool,
    ) -> None:
        """One that reads ahead has a route and no wish for chunks; its seal may be late."""
        self.tell(ev.DeadlinePassed())
        if meets:
            route = ahead = None
        if ahead is not None:
            route, chunk_tokens = "known", 0
            num_ready, sealed = (NUM_TOKENS, True) if sealed else (0, False)
        fetch_id = f"fetch-{len(self.seen)}" if again is None else self.pick(again)
        if fetch_id in self.seen and not self.is_kept(fetch_id):
            return
        event = ev.Requested(
            fetch_id=fetch_id,
            engine_id=engine_id,
            ticket=ticket_of(fetch_id, boot),
            first_token=first_token,
            num_tokens=NUM_TOKENS,
            tables={},
            timeout_s=timeout_s,
            reply_to=self.reply_to(),
            has_state=has_state,
            chunk_tokens=chunk_tokens,
            route=route,
            ahead=ahead,
        )
        if meets:
            shown = rendezvous_of(fetch_id)
            event = replace(event, ticket=shown.unknown_ticket(), meets=shown)
        must_refuse = fetch_id in self.seen or self.is_full()
        if not must_refuse:
            offer = Offered(num_ready, sealed and num_ready == NUM_TOKENS)
            self.seen[fetch_id] = Watched(event, self.now, boot, offer, met=not meets)

        first: set[type[ev.Command]] = {ev.ResolvePeer if route is None else ev.SendClaim}
        if meets:
            first = {ev.SendMeet}
        if ahead is not None:
            reads = first_token < NUM_TOKENS
            first = {ev.SendClaim if reads and ahead.claims else ev.HoldPeer}
            first.add(ev.ReadChunk if reads else ev.SendTake)
        if route is not None and self.turns.is_full():
            first = {ev.HoldPeer}

        commands = {type(command) for command in self.tell(event)}

        assert commands == ({ev.Refuse} if must_refuse else {ev.SendReply, *first})

    @rule(
        back=ANY_FETCH,
        num_more=st.sampled_from([0, 3, 8, 16, 32, 40]),
        seal=st.sampled_from([False, False, True]),
        hint=st.sampled_from([True, True, False]),
    )
    def compute(self, back: int, num_more: int, seal: bool, hint: bool) -> None:
        """The prefill engine has more, or says that this was all; the hint can get lost."""
        fetch_id = self.pick(back)
        if fetch_id in self.seen:
            self.grow(fetch_id, num_more, seal=seal)
            if hint:
                self.tell_hint(fetch_id)

    def grow(self, fetch_id: str, num_more: int, *, seal: bool) -> None:
        """An offer whose blocks the ticket names has them all at once, with the seal."""
        watched = self.seen[fetch_id]
        if watched.requested.ahead is None:
            watched.offer.grow(num_more, seal=seal)
        elif seal:
            watched.offer.grow(NUM_TOKENS - watched.offer.num_ready, seal=True)

    @precondition(lambda self: self.pending)
    @rule(which=ANY_PENDING)
    def decide(self, which: int) -> None:
        """The prefill agent handles a claim or renewal; its reply is on the way, and grows old."""
        pending = self.pending[which % len(self.pending)]
        if isinstance(pending.asked, ev.SendClaim | ev.SendRenew):
            pending.granted = pending.granted or self.grant(pending.asked)

    @precondition(lambda self: self.pending)
    @rule(
        which=ANY_PENDING,
        num_answers=st.integers(1, 9),
        num_more=st.sampled_from([0, 5, 8, 16]),
        last_first=st.booleans(),
    )
    def answer_well(self, which: int, num_answers: int, num_more: int, last_first: bool) -> None:
        """For a while nothing goes wrong with one of the fetches, and its offer may grow."""
        fetch_id = self.pending[which % len(self.pending)].asked.fetch_id
        offer = self.seen[fetch_id].offer
        for _ in range(num_answers):
            if num_more and not offer.sealed:
                self.grow(fetch_id, num_more, seal=offer.num_ready + num_more >= NUM_TOKENS)
                self.tell_hint(fetch_id)
            mine = [i for i, p in enumerate(self.pending) if p.asked.fetch_id == fetch_id]
            if mine:
                self.answer(which=mine[-last_first], code=None, lease_s=2.0, path="direct")

    @precondition(lambda self: self.pending)
    @rule(
        which=ANY_PENDING,
        code=MAYBE_ERROR,
        lease_s=st.sampled_from([0.25, 2.0, 2.0]),
        path=st.sampled_from(["direct", "packed", ""]),
    )
    def answer(self, *, which: int, code: ErrorCode | None, lease_s: float, path: str) -> None:
        pending = self.pending.pop(which % len(self.pending))
        asked, fetch_id = pending.asked, pending.asked.fetch_id
        if isinstance(asked, ev.SendTake) and code is None and not self.seen[fetch_id].offer.sealed:
            code = ErrorCode.OFFER_OPEN
        error = None if code is None else RemoteError("any", code=code)
        match asked:
            case ev.ReadChunk():
                self.tell(ev.DeadlinePassed())
                num_bytes = 100 * (asked.stop - asked.start)
                ended = ev.ChunkRead(fetch_id, num_bytes, error, path)
                self.seen[fetch_id].end_chunk(ended, self.now)
                self.tell(ended)
            case ev.SendRenew() if error is not None:
                if code is ErrorCode.BUSY:  # it is asked again, a little later
                    self.seen[fetch_id].renew_at = self.now
                    self.seen[fetch_id].asks_by = self.now + LIMITS.busy_retry_s
                self.tell(ev.RenewFailed(fetch_id, error))
            case _ if error is not None:
                early = {ErrorCode.BUSY, ErrorCode.OFFER_OPEN}
                can_come = isinstance(asked, ev.SendTake) and code in early
                self.seen[fetch_id].confirm_lost = can_come or code is ErrorCode.TIMEOUT
                waits = isinstance(asked, ev.SendMeet) and self.seen[fetch_id].report is None
                waits &= self.now < self.seen[fetch_id].deadline
                self.tell(ev.StepFailed(fetch_id, error))
                if waits and code in (ErrorCode.BUSY, ErrorCode.TIMEOUT):
                    assert self.seen[fetch_id].report is None, "it does not wait for the offer"
            case ev.SendMeet():
                watched = self.seen[fetch_id]
                watched.met |= watched.report is None and self.now < watched.deadline
                ticket = ticket_of(fetch_id, watched.agent_boot)
                self.tell(ev.OfferMet(fetch_id, ticket))
            case ev.ResolvePeer():
                self.tell(ev.PeerReady(fetch_id))
            case ev.SendConfirm() | ev.SendTake():
                self.seen[fetch_id].confirmed = True
                self.tell(ev.LeaseConfirmed(fetch_id))
            case ev.SendClaim() | ev.SendRenew():
                granted = pending.granted or self.grant(asked)
                granted = msgspec.structs.replace(granted, lease_s=lease_s)
                self.tell_granted(pending, granted)

    @precondition(lambda self: self.bound_questions())
    @rule(which=ANY_PENDING, lie=LIES)
    def answer_falsely(self, which: int, lie: str) -> None:
        self.tell(ev.DeadlinePassed())
        questions = self.bound_questions()
        pending = questions[which % len(questions)]
        self.pending.remove(pending)
        self.tell_granted(pending, pending.granted or self.grant(pending.asked), lie)

    def bound_questions(self) -> list[Pending]:
        """Those whose answer has to fit what an earlier grant, or the ticket, has said."""
        return [
            p
            for p in self.pending
            if isinstance(p.asked, ev.SendRenew)
            or (isinstance(p.asked, ev.SendClaim) and self.seen[p.asked.fetch_id].requested.ahead)
        ]

    @rarely(3)
    @rule(back=ANY_FETCH)
    def hint(self, back: int) -> None:
        self.tell_hint(self.pick(back))

    @rarely(5)
    @rule(back=ANY_FETCH, release_offer=st.booleans())
    def cancel(self, back: int, release_offer: bool) -> None:
        self.tell(ev.DeadlinePassed())
        fetch_id = self.pick(back)
        kept = self.is_kept(fetch_id)
        if kept and self.seen[fetch_id].report is None:
            self.seen[fetch_id].cancelled = True

        event = ev.CancelRequested(fetch_id, self.reply_to(), release_offer)
        (answer, *more) = self.tell(event)

        assert isinstance(answer, ev.SendReply) == kept
        ends = [c for c in more if isinstance(c, ev.SendWithdraw | ev.SendForgo)]
        if not (kept and release_offer) or self.seen[fetch_id].is_completed:
            assert not ends
        elif self.seen[fetch_id].met:
            assert ends == [ev.SendWithdraw(ticket_of(fetch_id, self.seen[fetch_id].agent_boot))]
        else:
            assert ends == [ev.SendForgo(rendezvous_of(fetch_id))]

    @precondition(lambda self: self.turns.queues)
    @rarely(3)
    @rule(code=st.sampled_from(ErrorCode))
    def lose_what_a_queued_fetch_holds(self, code: ErrorCode) -> None:
        """Its peer is gone, or it was so when it was to be held."""
        self.tell(ev.DeadlinePassed())
        for queue in list(self.turns.queues.values())[:1]:
            fetch_id = queue[0]
            self.tell(ev.StepFailed(fetch_id, RemoteError("any", code=code)))
            assert self.seen[fetch_id].report is not None

    @rarely(11)
    @rule(boot=BOOTS)
    def lose_peer(self, boot: str) -> None:
        self.tell(ev.PeerGone(boot))
        assert all(w.report for w in self.seen.values() if w.agent_boot == boot and w.met)

    @rarely(13)
    @rule(engine_id=ENGINES)
    def lose_engine(self, engine_id: str) -> None:
        self.tell(ev.EngineLost(engine_id))
        assert all(w.report for w in self.seen.values() if w.requested.engine_id == engine_id)

    @rarely(31)
    @rule(stop=st.booleans())
    def drain_or_stop(self, stop: bool) -> None:
        self.draining = True
        self.tell(ev.Stopped() if stop else ev.DrainStarted())
        assert not stop or all(w.report for w in self.seen.values())

    @rule(elapsed_s=st.sampled_from([0.125, 0.125, 0.125, 0.25, 0.25, 1.0, 5.0]))
    def pass_time_untold(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rarely(4)
    @rule()
    def pass_time_to_the_next_deadline(self) -> None:
        due = self.table.next_deadline()
        self.now = max(self.now, due if due is not None else self.now)
        self.tell(ev.DeadlinePassed())
        due = self.table.next_deadline()
        assert due is None or due > self.now, "handling what is due makes progress"

    @invariant()
    def the_tables_are_bounded_and_hold_what_is_not_over(self) -> None:
        assert len(self.table.live) <= LIMITS.max_fetches
        assert len(self.table.retired) <= LIMITS.max_retired
        not_over = {f for f, w in self.seen.items() if w.report is None or w.in_flight}
        assert set(self.table.live) == not_over
        draining = sum(w.report is not None and w.in_flight for w in self.seen.values())
        assert self.table.num_in(FetchState.DRAINING) == draining

    @invariant()
    def somebody_will_look_at_every_fetch_by_its_deadline(self) -> None:
        deadlines = [self.ends_at(w) for w in self.seen.values() if w.report is None]
        due = self.table.next_deadline()
        assert (due is None) == (not deadlines)
        assert due is None or due <= min(deadlines)

    @invariant()
    def what_is_over_keeps_no_tables_of_an_offer(self) -> None:
        assert not any(fetch.tables or fetch.chunk for fetch in self.table.retired.values())

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
                self.answer(which=0, code=ErrorCode.BUSY, lease_s=2.0, path="")
            self.pass_time_to_the_next_deadline()

        assert not self.table.live
        for watched in self.seen.values():
            assert watched.report is not None
            ended = watched.given_back | watched.superseded
            assert watched.confirmed or ended >= watched.granted, "a lease was left to its expiry"


TestFetchInterleavings = FetchInterleavings.TestCase
TestFetchInterleavings.settings = settings(
    deadline=None, max_examples=num_examples(600), stateful_step_count=50
)
