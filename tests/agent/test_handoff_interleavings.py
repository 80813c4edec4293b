"""Both tables on a network that drops, repeats and reorders, with agents that crash.

Memory is a dict from block to what is written there. The prefill engine writes over a block as
soon as it is told that the block is its own again, or that its agent is gone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import Message
from kvbus.protocol.peer import Granted
from kvbus.protocol.ticket import Ticket
from kvbus_decode import fetch_events as dec
from kvbus_decode.fetch import FetchLimits
from kvbus_decode.fetches import FetchTable
from kvbus_prefill import offer_events as pre
from kvbus_prefill.offer import OfferLimits
from kvbus_prefill.offers import OfferTable

OFFER_LIMITS = OfferLimits(max_lease_s=2.0, max_hold_s=6.0)
FETCH_LIMITS = FetchLimits(lease_s=2.0, request_timeout_s=1.0, busy_retry_s=0.25)
NUM_TOKENS = 32
Sent = dec.ResolvePeer | dec.SendClaim | dec.SendRenew | dec.SendConfirm


def rarely(one_in: int) -> Callable[[Any], Any]:
    """Enables a rule that ends much at once in one of ``one_in`` steps only."""
    return precondition(lambda self: self.num_events % one_in == one_in - 1)


@dataclass
class Source:
    """An offer of the prefill engine: two blocks, written one after the other."""

    ticket: Ticket
    blocks: tuple[int, int]
    num_written: int
    kv: tuple[str, str]
    outcome: Outcome | None = None


@dataclass
class Target:
    """A fetch of the decode engine, and what has landed in its two blocks."""

    source: Source
    deadline: float
    landed: list[str | None] = field(default_factory=lambda: [None, None])
    outcome: Outcome | None = None
    blocks_free: bool = False


@dataclass(frozen=True)
class Request:
    """On the wire; the event's ``reply_to`` is the number of the request."""

    agent_boot: str
    event: pre.RequestEvent


@dataclass(frozen=True)
class Answer:
    """On the wire, back to the process that asked."""

    number: int
    result: Message | KVBusError


class HandoffInterleavings(RuleBasedStateMachine):
    """Rules are what engines, network, fabric, clock and fate can do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_events = 0
        self.num_boots = 0
        self.memory: dict[int, str] = {}
        self.sources: dict[str, Source] = {}
        self.targets: dict[str, Target] = {}
        self.wire: list[Request | Answer] = []
        self.asked: dict[int, tuple[float, Sent]] = {}
        self.num_asked = 0
        self.num_fetches = 0
        self.reads: dict[str, dec.StartRead] = {}
        self.start_prefill()
        self.start_decode()

    def start_prefill(self) -> None:
        self.num_boots += 1
        self.boot = f"boot-{self.num_boots}"
        self.prefill = OfferTable(OFFER_LIMITS)

    def start_decode(self) -> None:
        self.decode = FetchTable(FETCH_LIMITS)

    # The engines.

    @precondition(lambda self: sum(s.outcome is None for s in self.sources.values()) < 2)
    @rule(sealed=st.booleans(), ttl_s=st.sampled_from([8.0, 8.0, 1.0]))
    def offer(self, sealed: bool, ttl_s: float) -> None:
        number = len(self.sources)
        offer_id = f"offer-{number}"
        blocks, kv = (2 * number, 2 * number + 1), (f"first-{number}", f"second-{number}")
        ticket = Ticket("p", self.boot, "tcp://p", "engine-p", "e", offer_id, f"r-{number}", 32)
        source = Source(ticket, blocks, 2 if sealed else 1, kv)
        self.sources[offer_id] = source
        for block, content in list(zip(blocks, kv, strict=True))[: source.num_written]:
            self.memory[block] = content
        self.tell_prefill(
            pre.Opened(
                offer_id=offer_id,
                engine_id="engine-p",
                request_id=f"r-{number}",
                num_tokens=16 * source.num_written,
                tables={"full": BlockTable.of(blocks[: source.num_written])},
                sealed=sealed,
                ttl_s=ttl_s,
                ticket={},
                reply_to=None,
            )
        )

    @precondition(lambda self: self.sources)
    @rule(back=st.integers(0, 2))
    def finish_prefill(self, back: int) -> None:
        source = self.recent_source(back)
        offer_id = source.ticket.offer_id
        if source.outcome is None and source.num_written == 1:
            self.memory[source.blocks[1]] = source.kv[1]
            source.num_written = 2
            more = {"full": BlockTable.of(source.blocks[1:], first_block=1)}
            self.tell_prefill(pre.Extended(offer_id, NUM_TOKENS, more, None))
            self.tell_prefill(pre.Sealed(offer_id, None))

    @rarely(5)
    @precondition(lambda self: self.sources)
    @rule(back=st.integers(0, 2))
    def withdraw(self, back: int) -> None:
        self.tell_prefill(pre.Withdrawn(self.recent_source(back).ticket.offer_id, None))

    @precondition(
        lambda self: self.sources and sum(t.outcome is None for t in self.targets.values()) < 3
    )
    @rule(back=st.sampled_from([0, 0, 0, 1, 2]), timeout_s=st.sampled_from([60.0, 10.0, 1.0]))
    def fetch(self, back: int, timeout_s: float) -> None:
        source = self.recent_source(back)
        fetch_id = f"fetch-{self.num_fetches}"
        self.num_fetches += 1
        self.targets[fetch_id] = Target(source, self.now + timeout_s)
        self.tell_decode(
            dec.Requested(
                fetch_id, "engine-d", source.ticket, 0, NUM_TOKENS, {}, timeout_s, fetch_id
            )
        )

    @rarely(11)
    @precondition(lambda self: self.targets)
    @rule(back=st.integers(0, 2))
    def cancel(self, back: int) -> None:
        fetch_id = list(self.targets)[-1 - back % len(self.targets)]
        self.tell_decode(dec.CancelRequested(fetch_id, None))

    # The network.

    @precondition(lambda self: self.wire)
    @rule(num_messages=st.integers(1, 4))
    def deliver_in_order(self, num_messages: int) -> None:
        for _ in range(min(num_messages, len(self.wire))):
            self.deliver(0, 1)

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 7), copies=st.sampled_from([1, 1, 1, 1, 2, 0]))
    def deliver(self, which: int, copies: int) -> None:
        """Once is what a network should do; a copy stays on the wire and comes later."""
        message = self.wire.pop(which % len(self.wire))
        self.wire += [message] * (copies - 1)
        if copies:
            self.arrive(message)

    def arrive(self, message: Request | Answer) -> None:
        if isinstance(message, Answer):
            self.settle(message.number, message.result)
        elif message.agent_boot != self.boot:
            stale = RemoteError("an earlier process", code=ErrorCode.STALE)
            self.wire.append(Answer(int(str(message.event.reply_to)), stale))
        else:
            self.tell_prefill(message.event)

    @rarely(4)
    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 7))
    def time_out(self, which: int) -> None:
        number = list(self.asked)[which % len(self.asked)]
        self.settle(number, RemoteError("no reply", code=ErrorCode.TIMEOUT))

    def settle(self, number: int, result: Message | KVBusError) -> None:
        """The first answer counts, the agent drops any other."""
        if number not in self.asked:
            return
        sent_at, sent = self.asked.pop(number)
        match sent, result:
            case dec.SendRenew(fetch_id), KVBusError() as error:
                self.tell_decode(dec.RenewFailed(fetch_id, error))
            case _, KVBusError() as error:
                self.tell_decode(dec.StepFailed(sent.fetch_id, error))
            case dec.ResolvePeer(fetch_id), _:
                self.tell_decode(dec.PeerReady(fetch_id))
            case dec.SendConfirm(fetch_id), _:
                self.tell_decode(dec.LeaseConfirmed(fetch_id))
            case _, Granted() as granted:
                ticket = self.targets[sent.fetch_id].source.ticket
                claimed = ticket if isinstance(sent, dec.SendClaim) else None
                self.tell_decode(dec.LeaseGranted(sent.fetch_id, sent_at, granted, claimed))

    @precondition(lambda self: self.targets)
    @rule(back=st.integers(0, 2))
    def hint(self, back: int) -> None:
        fetch_id = list(self.targets)[-1 - back % len(self.targets)]
        self.tell_decode(dec.OfferAdvanced(fetch_id))

    # The fabric.

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 3), position=st.integers(0, 1))
    def land(self, which: int, position: int) -> None:
        read = list(self.reads.values())[which % len(self.reads)]
        target = self.targets[read.fetch_id]
        assert not target.blocks_free, "bytes land in blocks that the engine has back"
        block = int(read.tables["full"].array()[position])
        target.landed[position] = self.memory[block]

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 3), works=st.sampled_from([True, True, True, False]))
    def end_read(self, which: int, works: bool) -> None:
        fetch_id = list(self.reads)[which % len(self.reads)]
        landed = self.targets[fetch_id].landed
        for position in (0, 1):
            if works and landed[position] is None:
                self.land(which, position)
        del self.reads[fetch_id]
        lost = None if works else RemoteError("fabric", code=ErrorCode.TRANSFER_FAILED)
        self.tell_decode(dec.ReadEnded(fetch_id, 2, lost))

    # Clock and fate.

    @rule(elapsed_s=st.sampled_from([0.125, 0.125, 0.5, 2.0]), told=st.booleans())
    def pass_time(self, elapsed_s: float, told: bool) -> None:
        self.now += elapsed_s
        if told:
            self.tell_prefill(pre.DeadlinePassed())
            self.tell_decode(dec.DeadlinePassed())

    @rarely(17)
    @rule(noticed=st.booleans())
    def crash_prefill(self, noticed: bool) -> None:
        """The engine hears of it and uses its blocks again; the decode agent may not."""
        boot = self.boot
        for source in self.sources.values():
            if source.outcome is None:
                self.overwrite(source, Outcome.WITHDRAWN)
        self.start_prefill()
        if noticed:
            self.tell_decode(dec.PeerLost(boot))

    @rarely(19)
    @rule()
    def crash_decode(self) -> None:
        for target in self.targets.values():
            target.outcome = target.outcome or Outcome.FAILED
        self.asked.clear()
        self.reads.clear()
        self.start_decode()

    # What the tables say, and the checks.

    def recent_source(self, back: int) -> Source:
        return list(self.sources.values())[-1 - back % len(self.sources)]

    def overwrite(self, source: Source, outcome: Outcome) -> None:
        source.outcome = outcome
        for block in source.blocks:
            self.memory[block] = "overwritten"

    def tell_prefill(self, event: pre.Event) -> None:
        self.num_events += 1
        for command in self.prefill.handle(event, self.now):
            match command:
                case pre.Reply(int(number), body):
                    self.wire.append(Answer(number, body))
                case pre.Refuse(int(number), error):
                    self.wire.append(Answer(number, error))
                case pre.ReportReleased(_, offer_id, _, outcome):
                    source = self.sources[offer_id]
                    assert source.outcome is None, "released twice"
                    self.overwrite(source, outcome)

    def tell_decode(self, event: dec.Event) -> None:
        self.num_events += 1
        for command in self.decode.handle(event, self.now):
            match command:
                case dec.StartRead(fetch_id):
                    self.reads[fetch_id] = command
                case dec.ReportFetched():
                    self.check_report(command)
                case dec.ReportBlocksFreed(fetch_id):
                    assert fetch_id not in self.reads
                    self.targets[fetch_id].blocks_free = True
                case dec.Refuse(reply_to=str(fetch_id), error=error):
                    assert error.code is ErrorCode.BUSY, error
                    del self.targets[fetch_id]
                case dec.SendRelease(ticket, epoch):
                    self.send(ticket, pre.Returned(ticket.offer_id, epoch, 0))
                case dec.ResolvePeer() | dec.SendClaim() | dec.SendRenew() | dec.SendConfirm():
                    self.ask(command)
        for target in self.targets.values():
            assert target.outcome or self.now < target.deadline

    def check_report(self, report: dec.ReportFetched) -> None:
        target = self.targets[report.fetch_id]
        assert target.outcome is None, "reported twice"
        target.outcome, target.blocks_free = report.outcome, report.blocks_free
        if report.outcome is Outcome.COMPLETED:
            assert tuple(target.landed) == target.source.kv, "wrong tokens"
            assert [t.outcome for t in self.targets.values() if t.source is target.source].count(
                Outcome.COMPLETED
            ) == 1, "one offer, two readers who believe that they have it"

    def ask(self, sent: Sent) -> None:
        self.num_asked += 1
        self.asked[self.num_asked] = (self.now, sent)
        ticket, number = self.targets[sent.fetch_id].source.ticket, self.num_asked
        match sent:
            case dec.ResolvePeer():
                self.wire.append(Answer(number, Message()))
            case dec.SendClaim():
                claim = pre.Claimed(ticket.offer_id, sent.fetch_id, FETCH_LIMITS.lease_s, number)
                self.send(ticket, claim)
            case dec.SendRenew(epoch=epoch, known_blocks=known):
                lease_s = FETCH_LIMITS.lease_s
                self.send(ticket, pre.Renewed(ticket.offer_id, epoch, lease_s, known, number))
            case dec.SendConfirm(epoch=epoch):
                self.send(ticket, pre.Confirmed(ticket.offer_id, epoch, number))

    def send(self, ticket: Ticket, event: pre.RequestEvent) -> None:
        self.wire.append(Request(ticket.agent_boot, event))

    def settle_everything(self) -> None:
        """From now on nothing is lost: deliver, read and wait until nobody has anything to do."""
        while self.wire or self.asked or self.reads or self.due() is not None:
            while self.wire or self.reads:
                if self.wire:
                    self.deliver(0, 1)
                if self.reads:
                    self.end_read(0, works=True)
            if self.asked:
                self.time_out(0)
            self.now = max(self.now, self.due() or 0.0)
            self.tell_prefill(pre.DeadlinePassed())
            self.tell_decode(dec.DeadlinePassed())

    def due(self) -> float | None:
        times = (self.prefill.next_deadline(), self.decode.next_deadline())
        return min((when for when in times if when is not None), default=None)

    def teardown(self) -> None:
        self.settle_everything()

        assert not self.prefill.offers
        assert not self.decode.fetches
        assert all(source.outcome for source in self.sources.values())
        assert all(target.outcome for target in self.targets.values())


TestHandoffInterleavings = HandoffInterleavings.TestCase
TestHandoffInterleavings.settings = settings(
    deadline=None, max_examples=400, stateful_step_count=60
)


def test_a_handoff_completes_with_the_right_kv_when_nothing_is_lost() -> None:
    world = HandoffInterleavings()
    world.offer(sealed=False, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0)
    while world.wire:
        world.deliver(0, 1)

    world.finish_prefill(0)
    world.hint(0)
    world.settle_everything()

    assert world.targets["fetch-0"].outcome is Outcome.COMPLETED
    assert world.sources["offer-0"].outcome is Outcome.COMPLETED


def test_a_fetch_of_an_offer_that_was_withdrawn_under_its_read_fails_though_all_has_landed() -> (
    None
):
    world = HandoffInterleavings()
    world.offer(sealed=True, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0)
    while world.wire:
        world.deliver(0, 1)

    world.withdraw(0)
    world.settle_everything()

    assert world.targets["fetch-0"].landed == ["overwritten", "overwritten"]
    assert world.targets["fetch-0"].outcome is Outcome.FAILED


def test_of_two_fetches_of_one_offer_one_completes() -> None:
    world = HandoffInterleavings()
    world.offer(sealed=True, ttl_s=8.0)

    world.fetch(0, timeout_s=60.0)
    world.fetch(0, timeout_s=60.0)
    world.settle_everything()

    outcomes = sorted(str(target.outcome) for target in world.targets.values())
    assert outcomes == [Outcome.COMPLETED, Outcome.FAILED]
