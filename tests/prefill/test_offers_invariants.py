"""The offer table under any interleaving of engines, readers and time, against a plain oracle.

The oracle knows states, epochs and times as numbers; it knows no table of transitions.
"""

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome
from kvbus.table import Story
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferedBox, OfferLimits, OfferState
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.offer.transitions import TRANSITIONS
from tests.examples import num_examples, rarely
from tests.stories import StoryMachine

SECRET, TOKEN = "secret", "token"
LIMITS = OfferLimits(max_offers=3, max_retired=3, max_lease_s=2.0, max_hold_s=3.0)
ENGINES = st.sampled_from(["engine-a", "engine-b"])
READERS = st.sampled_from(["reader-a", "reader-a", "reader-b"])
LEASES = st.sampled_from([2.0, 100.0, 1.0, 0.5])
ANY_OFFER = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3])
ANSWERS = ev.SendReply | ev.Refuse
KINDS = ["claim", "take", "withdraw", "renew", "confirm", "return"]
EPOCHS_AGO = st.sampled_from([0, 0, 0, 0, 0, 1, 2, -1])


@dataclass
class ExpectedLease:
    """One lease as the oracle knows it; ``end`` when it is over, ``token`` what it was given."""

    reader_id: str
    ends_at: float
    held_until: float
    token: str = TOKEN
    end: ErrorCode | None = None
    is_done: bool = False


@dataclass
class Expected:
    """What the oracle knows of one offer; it forgets no lease."""

    engine_id: str
    request_id: str
    sealed: bool
    num_tokens: int
    ttl_s: float
    expires_at: float
    hold_ends_at: float | None = None
    readers: int = 1
    epoch: int = 0
    leases: dict[int, ExpectedLease] = field(default_factory=dict)
    blocks: tuple[int, ...] = (1,)
    outcome: Outcome | None = None
    ended_by: ErrorCode | None = None

    @property
    def live(self) -> dict[int, ExpectedLease]:
        return {epoch: lease for epoch, lease in self.leases.items() if lease.end is None}

    @property
    def num_done(self) -> int:
        return sum(lease.is_done for lease in self.leases.values())

    def of(self, reader_id: str) -> int | None:
        """The live lease of a reader."""
        return next((e for e, lease in self.live.items() if lease.reader_id == reader_id), None)

    def is_full(self, reader_id: str) -> bool:
        """Whether other readers have all that may be had."""
        others = [lease for lease in self.live.values() if lease.reader_id != reader_id]
        return len(others) + self.num_done >= self.readers

    def age(self, now: float) -> None:
        """What time alone does."""
        for lease in self.live.values():
            if lease.ends_at <= now:
                lease.end = ErrorCode.LEASE_EXPIRED
        if not self.live and self.expires_at <= now and self.outcome is None:
            outcome = Outcome.COMPLETED if self.num_done else Outcome.EXPIRED
            self.end(outcome, ErrorCode.OFFER_EXPIRED)

    def wait_for_seal(self, now: float) -> None:
        """A reader that came before the seal keeps the offer for a while, but not for ever."""
        if self.hold_ends_at is None:
            self.hold_ends_at = now + LIMITS.max_hold_s
        kept_until = min(now + LIMITS.max_lease_s, self.hold_ends_at)
        self.expires_at = max(self.expires_at, kept_until)

    def end(self, outcome: Outcome, code: ErrorCode) -> None:
        for lease in self.live.values():
            lease.end = code
        self.outcome, self.ended_by = outcome, code

    def grant(self, epoch: int, lease_s: float, now: float) -> None:
        lease = self.leases[epoch]
        until = min(now + min(lease_s, LIMITS.max_lease_s), lease.held_until)
        lease.ends_at = max(lease.ends_at, until)

    def done(self, lease: ExpectedLease) -> None:
        """Its reader has everything."""
        lease.end, lease.is_done = ErrorCode.OFFER_COMPLETED, True
        if self.num_done == self.readers:
            self.end(Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED)


def copy_of(table: OfferTable) -> OfferTable:
    """A table to try things with: nothing that `handle` changes is shared."""
    deadlines = copy.copy(table._deadlines)
    deadlines._when, deadlines._heap = dict(deadlines._when), list(deadlines._heap)
    made = OfferTable(table.limits)
    made.live = {
        offer_id: replace(
            offer,
            tables=dict(offer.tables),
            leases={epoch: replace(lease) for epoch, lease in offer.leases.items()},
            story=Story(),
        )
        for offer_id, offer in table.live.items()
    }
    made.retired = OrderedDict(table.retired)
    made.draining, made._requests = table.draining, dict(table._requests)
    made._deadlines = deadlines
    return made


class OfferInterleavings(StoryMachine):
    """Rules are events; what the commands say is checked where they come out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OfferTable(LIMITS)
        self.now = 0.0
        self.expected: dict[str, Expected] = {}
        self.live_leases: dict[str, set[int]] = defaultdict(set)
        self.last_epoch: dict[str, int] = {}
        self.reported: dict[str, Outcome] = {}
        self.draining = False
        self.num_requests = 0
        self.num_events = 0

    def tables(self) -> tuple[OfferTable]:
        return (self.table,)

    # The environment.

    @precondition(lambda self: len(self.table.live) < 2 or self.num_events % 4 == 0)
    @rule(
        engine_id=ENGINES,
        request=st.integers(0, 3),
        sealed=st.booleans(),
        ttl_s=st.sampled_from([8.0, 8.0, 1.0, 2.0]),
        readers=st.sampled_from([1, 1, 2, 3]),
    )
    def open(
        self, engine_id: str, request: int, *, sealed: bool, ttl_s: float, readers: int
    ) -> None:
        offer_id, request_id = f"offer-{len(self.expected)}", f"request-{request}"
        self.age()
        live = [o for o in self.expected.values() if o.outcome is None]
        if self.draining:
            code: ErrorCode | None = ErrorCode.DRAINING
        elif any((o.engine_id, o.request_id) == (engine_id, request_id) for o in live):
            code = ErrorCode.OFFER_EXISTS
        elif len(live) >= LIMITS.max_offers:
            code = ErrorCode.BUSY
        else:
            code = None
            self.expected[offer_id] = Expected(
                engine_id, request_id, sealed, 16, ttl_s, self.now + ttl_s, readers=readers
            )
        tables = {"full": BlockTable.of([1])}
        self.request(
            ev.Opened(
                offer_id,
                engine_id,
                request_id,
                16,
                tables,
                sealed,
                ttl_s,
                SECRET,
                {},
                self.reply_to(),
                readers=readers,
            ),
            code,
        )

    @rule(back=ANY_OFFER, first_block=st.sampled_from([None, None, 1, 7]), more=st.booleans())
    def extend(self, back: int, first_block: int | None, more: bool) -> None:
        offer_id, offer = self.pick(back)
        num_tokens = offer.num_tokens + 16 if more else offer.num_tokens - 1
        held = offer.num_tokens // 16
        first = held if first_block is None else first_block
        code = self.refusal(offer_id)
        if code is None and offer.sealed:
            code = ErrorCode.OFFER_SEALED
        elif code is None and not more:
            code = ErrorCode.INVALID
        elif code is None and first != held:
            code = ErrorCode.GEOMETRY
        elif code is None:
            offer.num_tokens = num_tokens
            offer.expires_at = max(offer.expires_at, self.now + offer.ttl_s)
            offer.blocks += (9,)
        tables = {"full": BlockTable.of([9], first_block=first)}
        self.request(ev.Extended(offer_id, num_tokens, tables, self.reply_to()), code)

    @rule(back=ANY_OFFER)
    def seal(self, back: int) -> None:
        offer_id, offer = self.pick(back)
        code = self.refusal(offer_id)
        if code is None and offer.sealed:
            code = ErrorCode.OFFER_SEALED
        elif code is None:
            offer.sealed = True
            offer.expires_at = max(offer.expires_at, self.now + offer.ttl_s)
        self.request(ev.Sealed(offer_id, self.reply_to()), code)

    @rarely(5)
    @rule(back=ANY_OFFER)
    def withdraw(self, back: int) -> None:
        offer_id, offer = self.pick(back)
        code = None if offer.outcome and not self.forgotten(offer_id) else self.refusal(offer_id)
        if offer.outcome is None:
            offer.end(Outcome.WITHDRAWN, ErrorCode.OFFER_WITHDRAWN)
        self.request(ev.Withdrawn(offer_id, None, self.reply_to()), code)

    @rule(back=ANY_OFFER, reader_id=READERS, lease_s=LEASES)
    def claim(self, back: int, reader_id: str, lease_s: float) -> None:
        offer_id, offer = self.pick(back)
        code = self.refusal(offer_id)
        if code is None and offer.is_full(reader_id):
            code = ErrorCode.BUSY
        elif code is None:
            held_until, own = self.now + LIMITS.max_hold_s, offer.of(reader_id)
            if own is not None:
                held_until = offer.leases[own].held_until
                offer.leases[own].end = ErrorCode.STALE
            offer.epoch += 1
            offer.leases[offer.epoch] = ExpectedLease(reader_id, self.now, held_until)
            offer.grant(offer.epoch, lease_s, self.now)
        self.request(ev.Claimed(offer_id, SECRET, reader_id, lease_s, TOKEN, self.reply_to()), code)

    @rule(back=ANY_OFFER, epochs_ago=EPOCHS_AGO, lease_s=LEASES)
    def renew(self, back: int, epochs_ago: int, lease_s: float) -> None:
        offer_id, offer = self.pick(back)
        epoch = offer.epoch - epochs_ago
        code = self.late(offer_id, epoch)
        if code is None:
            offer.grant(epoch, lease_s, self.now)
        self.request(ev.Renewed(offer_id, epoch, TOKEN, lease_s, {}, self.reply_to()), code)

    @rule(back=ANY_OFFER, epochs_ago=EPOCHS_AGO)
    def confirm(self, back: int, epochs_ago: int) -> None:
        offer_id, offer = self.pick(back)
        epoch = offer.epoch - epochs_ago
        code, lease = self.late(offer_id, epoch), offer.leases.get(epoch)
        said_before = lease is not None and lease.is_done and lease.token == TOKEN
        if said_before and not self.forgotten(offer_id):
            code = None
        elif code is None and not offer.sealed:
            code = ErrorCode.OFFER_OPEN
        elif code is None and lease is not None:
            offer.done(lease)
        self.request(ev.Confirmed(offer_id, epoch, TOKEN, self.reply_to()), code)

    @rule(
        back=ANY_OFFER,
        reader_id=READERS,
        token=st.sampled_from(["own", "own", "another"]),
        altered=st.sampled_from([False, False, False, True]),
    )
    def take(self, back: int, reader_id: str, token: str, altered: bool) -> None:
        offer_id, offer = self.pick(back)
        blocks = (*offer.blocks, 7) if altered else offer.blocks
        said_before = any(one.is_done and one.token == token for one in offer.leases.values())
        code = self.refusal(offer_id)
        if said_before and not self.forgotten(offer_id):
            code = None
        elif code is None and not offer.sealed:
            code = ErrorCode.OFFER_OPEN
            offer.wait_for_seal(self.now)
        elif code is None and offer.is_full(reader_id):
            code = ErrorCode.BUSY
        elif code is None and altered:
            code = ErrorCode.GEOMETRY
        elif code is None:
            if (own := offer.of(reader_id)) is not None:
                offer.leases[own].end = ErrorCode.STALE
            offer.epoch += 1
            lease = offer.leases[offer.epoch] = ExpectedLease(reader_id, 0.0, 0.0, token)
            offer.done(lease)
        tables = {"full": BlockTable.of(blocks)}
        self.request(ev.Taken(offer_id, SECRET, reader_id, token, tables, self.reply_to()), code)

    @rule(back=ANY_OFFER, epochs_ago=EPOCHS_AGO)
    def give_back(self, back: int, epochs_ago: int) -> None:
        offer_id, offer = self.pick(back)
        epoch = offer.epoch - epochs_ago
        code = self.late(offer_id, epoch)
        if code is None:
            offer.leases[epoch].end = ErrorCode.STALE
        self.request(ev.Returned(offer_id, epoch, TOKEN, self.reply_to()), code)

    @rule(back=ANY_OFFER, epochs_ago=EPOCHS_AGO, tokens_past=st.sampled_from([0, 0, 0, 1]))
    def pack(self, back: int, epochs_ago: int, tokens_past: int) -> None:
        offer_id, offer = self.pick(back)
        epoch = offer.epoch - epochs_ago
        code = self.late(offer_id, epoch)
        if code is None and tokens_past:
            code = ErrorCode.GEOMETRY
        last = offer.num_tokens // 16 - 1
        table = BlockTable.of([9 if last else 1], first_block=last)
        stop, before = offer.num_tokens + tokens_past, copy_of(self.table)
        box = OfferedBox(offer_id, epoch, TOKEN, "full", table, stop, False)
        refused: ErrorCode | None = None
        try:
            self.table.check_box(box, self.now)
        except KVBusError as error:
            refused = error.code
        if code is ErrorCode.OFFER_UNKNOWN:  # or it will be, once the table is told the time
            assert refused is not None
        else:
            assert refused == code
        assert (self.table.live, self.table.retired) == (before.live, before.retired)

    @rule(back=ANY_OFFER, kind=st.sampled_from(KINDS))
    def forge(self, back: int, kind: str) -> None:
        """Somebody who knows all that is published, and has no right."""
        offer_id, offer = self.pick(back)
        epoch, reply_to = max(offer.epoch, 1), self.reply_to()
        unknown = self.forgotten(offer_id)
        code = ErrorCode.OFFER_UNKNOWN if unknown else ErrorCode.FORBIDDEN
        if not unknown and not offer.epoch and kind in ("renew", "confirm", "return"):
            code = ErrorCode.STALE
        forged: dict[str, ev.RequestEvent] = {
            "claim": ev.Claimed(offer_id, TOKEN, "forger", 1.0, "new", reply_to),
            "take": ev.Taken(offer_id, TOKEN, "forger", "own", {}, reply_to),
            "withdraw": ev.Withdrawn(offer_id, TOKEN, reply_to),
            "renew": ev.Renewed(offer_id, epoch, SECRET, 1.0, {}, reply_to),
            "confirm": ev.Confirmed(offer_id, epoch, SECRET, reply_to),
            "return": ev.Returned(offer_id, epoch, SECRET, reply_to),
        }
        self.request(forged[kind], code)

    @rarely(11)
    @rule(engine_id=ENGINES)
    def lose_engine(self, engine_id: str) -> None:
        self.age()
        for offer in self.expected.values():
            if offer.outcome is None and offer.engine_id == engine_id:
                offer.end(Outcome.WITHDRAWN, ErrorCode.ENGINE_LOST)
        self.tell(ev.EngineLost(engine_id))

    @rarely(37)
    @rule()
    def drain(self) -> None:
        self.draining = True
        self.age()
        self.tell(ev.DrainStarted())

    @rarely(41)
    @rule()
    def stop(self) -> None:
        self.draining = True
        self.age()
        for offer in self.expected.values():
            if offer.outcome is None:
                offer.end(Outcome.WITHDRAWN, ErrorCode.DRAINING)
        self.tell(ev.Stopped())

    @rule(elapsed_s=st.sampled_from([0.5, 0.5, 1.0, 1.0, 0.25, 3.0, 20.0]))
    def pass_time_untold(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rarely(3)
    @rule()
    def pass_time_to_the_next_deadline(self) -> None:
        due = self.table.next_deadline()
        self.now = max(self.now, due if due is not None else self.now)
        self.tell_the_time()

    @rule()
    def tell_the_time(self) -> None:
        self.age()
        self.tell(ev.DeadlinePassed())
        due = self.table.next_deadline()
        assert due is None or due > self.now, "handling what is due makes progress"

    # The oracle.

    def pick(self, back: int) -> tuple[str, Expected]:
        """One of the last offers, or one that never was."""
        self.age()
        offer_ids = list(self.expected)[-4:]
        if back >= len(offer_ids):
            return "never", Expected("", "", True, 16, 1.0, 0.0, outcome=Outcome.EXPIRED)
        return offer_ids[-1 - back], self.expected[offer_ids[-1 - back]]

    def age(self) -> None:
        for offer in self.expected.values():
            offer.age(self.now)

    def forgotten(self, offer_id: str) -> bool:
        """Its tombstone was pushed out by younger ones, or is by what is due now."""
        table = copy_of(self.table)
        table.handle(ev.DeadlinePassed(), self.now)
        return offer_id not in table.live and offer_id not in table.retired

    def refusal(self, offer_id: str) -> ErrorCode | None:
        if self.forgotten(offer_id):
            return ErrorCode.OFFER_UNKNOWN
        return self.expected[offer_id].ended_by

    def late(self, offer_id: str, epoch: int) -> ErrorCode | None:
        """Why a lease is not live; only one that is remembered is told how it ended."""
        if self.forgotten(offer_id):
            return ErrorCode.OFFER_UNKNOWN
        offer = self.expected[offer_id]
        lease = offer.leases.get(epoch)
        if lease is None:
            return ErrorCode.STALE
        if lease.end is not None and not lease.is_done and epoch <= offer.epoch - offer.readers:
            return ErrorCode.STALE
        return lease.end if lease.token == TOKEN else ErrorCode.FORBIDDEN

    # The checks.

    def reply_to(self) -> str:
        self.num_requests += 1
        return f"reply-{self.num_requests}"

    def request(self, event: ev.RequestEvent, code: ErrorCode | None) -> None:
        """Exactly one answer, the one that the oracle gives; a refusal changes nothing.

        That of an early take changes how long the offer waits.
        """
        before = copy_of(self.table)

        commands = self.tell(event)

        (answer,) = (c for c in commands if isinstance(c, ANSWERS))
        assert answer.reply_to == event.reply_to
        assert (answer.error.code if isinstance(answer, ev.Refuse) else None) == code
        if isinstance(answer, ev.SendReply) and isinstance(answer.body, Granted):
            lease = self.expected[event.offer_id].live[answer.body.epoch]
            assert answer.body.lease_s == lease.ends_at - self.now
        if commands == [answer] and code is not None:
            if isinstance(event, ev.Taken) and code is ErrorCode.OFFER_OPEN:
                kept, expected = before.live[event.offer_id], self.expected[event.offer_id]
                kept.expires_at, kept.hold_ends_at = expected.expires_at, expected.hold_ends_at
            assert self.table.live == before.live
            assert self.table.retired == before.retired
            assert self.table.next_deadline() == before.next_deadline()

    def tell(self, event: ev.Event) -> list[ev.Command]:
        with self.telling():
            return self.tell_and_check(event)

    def tell_and_check(self, event: ev.Event) -> list[ev.Command]:
        states = {o: offer.state for o, offer in self.table.live.items()}
        due = self.table.next_deadline()
        overdue = due is not None and due <= self.now

        commands = self.table.handle(event, self.now)

        self.num_events += 1
        for command in commands:
            self.obey(command)
        num_answers = sum(isinstance(c, ANSWERS) for c in commands)
        assert num_answers == hasattr(event, "reply_to")
        if not overdue:
            self.check_declared(event, states, any(isinstance(c, ev.Refuse) for c in commands))
        return commands

    def check_declared(self, event: ev.Event, states: dict[str, OfferState], refused: bool) -> None:
        """Only the states that the table of transitions declares, and only where it applies."""
        hit = getattr(event, "offer_id", None)
        for offer_id, state in states.items():
            after = (self.table.live.get(offer_id) or self.table.retired[offer_id]).state
            if not refused and (hit == offer_id or (hit is None and after is not state)):
                assert after in TRANSITIONS[state, type(event)].to
            else:
                assert after is state

    def obey(self, command: ev.Command) -> None:
        match command:
            case ev.BeginLease(offer_id, epoch):
                num_live, offer = len(self.live_leases[offer_id]), self.expected[offer_id]
                assert num_live + offer.num_done < offer.readers, "as many as may read"
                assert epoch > self.last_epoch.get(offer_id, 0), "an epoch is never used again"
                assert offer_id not in self.reported
                self.live_leases[offer_id].add(epoch)
                self.last_epoch[offer_id] = epoch
            case ev.EndLease(offer_id, epoch):
                self.live_leases[offer_id].remove(epoch)
            case ev.ReportReleased(_, offer_id, _, outcome):
                assert not self.live_leases[offer_id], "released under a live lease"
                assert offer_id not in self.reported, "reported twice"
                self.reported[offer_id] = outcome

    @invariant()
    def leases_began_and_ended_in_pairs(self) -> None:
        assert self.table.num_leases() == sum(map(len, self.live_leases.values()))

    @invariant()
    def the_tables_are_bounded(self) -> None:
        assert len(self.table.live) <= LIMITS.max_offers
        assert list(self.table.retired) == list(self.reported)[-LIMITS.max_retired :]
        assert self.table._requests.keys() == {
            (o.opened.engine_id, o.opened.request_id) for o in self.table.live.values()
        }

    @invariant()
    def somebody_will_look_at_every_live_offer_by_its_bound(self) -> None:
        due = self.table.next_deadline()
        assert (due is None) == (not self.table.live)
        for offer_id in self.table.live:
            bound = self.expected[offer_id].expires_at + LIMITS.max_hold_s
            assert due is not None
            assert due <= bound

    @invariant()
    def readers_that_wait_for_a_seal_keep_no_offer_for_longer_than_one_may_hold_it(self) -> None:
        for offer in self.table.live.values():
            held_until = offer.hold_ends_at or 0.0
            assert offer.expires_at <= max(self.now + offer.opened.ttl_s, held_until)

    @invariant()
    def it_agrees_with_the_oracle_once_it_is_told_the_time(self) -> None:
        table = copy_of(self.table)
        expected = {offer_id: replace(offer) for offer_id, offer in self.expected.items()}

        table.handle(ev.DeadlinePassed(), self.now)

        for offer in expected.values():
            offer.age(self.now)
        live = {offer_id for offer_id, offer in expected.items() if offer.outcome is None}
        assert set(table.live) == live
        for offer_id in live:
            offer, leases = table.live[offer_id], expected[offer_id].live
            assert offer.state == (OfferState.SEALED if expected[offer_id].sealed else "open")
            held = {lease.epoch: lease.reader_id for lease in offer.live_leases}
            assert held == {epoch: lease.reader_id for epoch, lease in leases.items()}
            ends = [lease.ends_at for lease in leases.values()]
            assert offer.due_at == min(ends, default=expected[offer_id].expires_at)
            assert len(offer.leases) <= 2 * offer.opened.readers

    def teardown(self) -> None:
        """In the end every offer was reported once, as the oracle says."""
        while (due := self.table.next_deadline()) is not None:
            self.now = max(self.now, due)
            self.tell_the_time()

        assert not self.table.live
        assert not any(self.live_leases.values())
        assert self.reported == {o: offer.outcome for o, offer in self.expected.items()}


TestOfferInterleavings = OfferInterleavings.TestCase
TestOfferInterleavings.settings = settings(
    deadline=None, max_examples=num_examples(300), stateful_step_count=50
)
