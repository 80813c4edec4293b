"""Both tables, the memory of both engines, and the network between them.

Refuses to choose what happens next: the rules of the state machine on top of it do. Memory is a
dict from slot to what is written there. The prefill engine writes over the slots of an offer as
soon as it is told that its blocks are its own again, or that its agent is gone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Message, Outcome, Ticket
from kvbus_decode.fetch import events as dec
from kvbus_decode.fetch.state import FetchLimits
from kvbus_decode.fetch.table import FetchTable
from kvbus_prefill.offer import events as pre
from kvbus_prefill.offer.entry import OfferLimits
from kvbus_prefill.offer.table import OfferTable
from tests.stories import StoryMachine

OFFER_LIMITS = OfferLimits(max_lease_s=2.0, max_hold_s=6.0)
FETCH_LIMITS = FetchLimits(num_places=2, lease_s=2.0, request_timeout_s=1.0, busy_retry_s=0.25)
NUM_TOKENS, BLOCK_SIZE = 32, 8
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
STATE = NUM_TOKENS
"""Where the state stands among what a fetch reads: behind the last token."""

Sent = dec.ResolvePeer | dec.SendClaim | dec.SendRenew | dec.SendConfirm | dec.SendTake


@dataclass
class Source:
    """An offer of the prefill engine, whose tokens are written one after the other.

    The state is written over with every chunk; what the last one leaves is what counts. The ticket
    of one that was sealed when it was offered ``names_blocks``; so does that of one that the engine
    will not write to any more, though the agent does not know yet: of its blocks from
    ``first_unsaid`` on, and of the seal. So many ``readers`` may have it.
    """

    number: int
    ticket: Ticket
    num_written: int = 0
    sealed: bool = False
    is_cut: bool = False
    outcome: Outcome | None = None
    names_blocks: bool = False
    first_unsaid: int | None = None
    readers: int = 1

    def __post_init__(self) -> None:
        self.names_blocks = self.sealed

    @property
    def offer_id(self) -> str:
        return self.ticket.offer_id

    @property
    def num_blocks(self) -> int:
        """Blocks that are written to, the last one in part."""
        return -(-self.num_written // BLOCK_SIZE)

    def blocks(self, start: int = 0) -> BlockTable:
        first = NUM_BLOCKS * self.number
        return BlockTable.of(range(first + start, first + self.num_blocks), first_block=start)

    def slots(self) -> Iterator[int]:
        """Every slot of the memory that the offer can use, the state's behind those of tokens."""
        start = NUM_TOKENS * self.number
        yield from range(start, start + NUM_TOKENS)
        yield self.state_slot

    @property
    def state_slot(self) -> int:
        return -1 - self.number

    def kv(self, token: int) -> str:
        return f"{self.offer_id}, token {token}"

    def state(self) -> str:
        return f"{self.offer_id}, state after {self.num_written} tokens"


@dataclass
class Target:
    """A fetch of the decode engine, and what has landed of each token and of the state."""

    source: Source
    deadline: float
    first_token: int = 0
    has_state: bool = False
    read_to: int = 0
    num_chunks: int = 0
    landed: dict[int, str] = field(default_factory=dict)
    outcome: Outcome | None = None
    blocks_free: bool = False

    def __post_init__(self) -> None:
        self.read_to = self.first_token

    def wanted(self) -> dict[int, str]:
        """What the engine must have in the end."""
        tokens = range(self.first_token, NUM_TOKENS)
        state = {STATE: self.source.state()} if self.has_state and tokens else {}
        return {token: self.source.kv(token) for token in tokens} | state

    def start_chunk(self, chunk: dec.ReadChunk) -> None:
        """Check that the chunk is written by now, and follows the one before."""
        assert chunk.start == self.read_to, "every token once, and in order"
        assert chunk.stop <= self.source.num_written, "read before it was written"
        assert not chunk.last or (self.source.names_blocks and chunk.stop == NUM_TOKENS)
        assert chunk.stop > chunk.start or (chunk.last and self.has_state)
        self.read_to = chunk.stop
        self.num_chunks += 1

    def places(self, chunk: dec.ReadChunk) -> list[int]:
        """What the chunk writes: tokens, and the state with the last one."""
        tokens = list(range(chunk.start, chunk.stop))
        return [*tokens, STATE] if chunk.last and self.has_state else tokens


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


class HandoffWorld(StoryMachine):
    """What is, and what follows from what one rule does."""

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
        self.reads: dict[str, dec.ReadChunk] = {}
        self.start_prefill()
        self.start_decode()

    def tables(self) -> tuple[OfferTable, FetchTable]:
        return self.prefill, self.decode

    def start_prefill(self) -> None:
        self.num_boots += 1
        self.boot = f"boot-{self.num_boots}"
        self.prefill = OfferTable(OFFER_LIMITS)

    def start_decode(self) -> None:
        self.decode = FetchTable(FETCH_LIMITS)

    def write(self, source: Source, num_more: int, *, seal: bool) -> None:
        """The prefill engine computes and says so: `Extended` with new blocks, then `Sealed`."""
        if source.first_unsaid is not None:
            self.say(source)
            return
        known, start = source.num_blocks, source.num_written
        self.write_silently(source, num_more)
        if source.num_written > start:
            self.say_extended(source, known)
        if seal and source.num_written == NUM_TOKENS:
            self.say_sealed(source)

    def name_blocks(self, source: Source) -> None:
        """The prefill engine computes all that is left; its ticket is faster than what it says."""
        source.first_unsaid = source.num_blocks
        self.write_silently(source, NUM_TOKENS)
        source.names_blocks = True

    def say(self, source: Source) -> None:
        """What it had to say since then."""
        if source.first_unsaid is not None and source.outcome is None:
            self.say_extended(source, source.first_unsaid)
            self.say_sealed(source)

    def write_silently(self, source: Source, num_more: int) -> None:
        start, stop = source.num_written, min(source.num_written + num_more, NUM_TOKENS)
        for token in range(start, stop):
            self.memory[NUM_TOKENS * source.number + token] = source.kv(token)
        source.num_written = stop
        if stop > start:
            self.memory[source.state_slot] = source.state()

    def say_extended(self, source: Source, known: int) -> None:
        more = {"full": source.blocks(known)}
        self.tell_prefill(pre.Extended(source.offer_id, source.num_written, more, None))

    def say_sealed(self, source: Source) -> None:
        source.sealed = source.names_blocks = True
        source.first_unsaid = None
        self.tell_prefill(pre.Sealed(source.offer_id, None))

    def land_at(self, chunk: dec.ReadChunk, place: int) -> None:
        """The bytes of one token, or of the state, arrive as they are in memory now."""
        target = self.targets[chunk.fetch_id]
        assert not target.blocks_free, "bytes land in blocks that the engine has back"
        slot = target.source.state_slot
        if place != STATE:
            block = int(chunk.tables["full"].array()[place // BLOCK_SIZE])
            slot = block * BLOCK_SIZE + place % BLOCK_SIZE
        target.landed[place] = self.memory[slot]

    def arrive(self, message: Request | Answer) -> None:
        if isinstance(message, Answer):
            self.settle(message.number, message.result)
        elif message.agent_boot != self.boot:
            stale = RemoteError("an earlier process", code=ErrorCode.STALE)
            self.wire.append(Answer(int(str(message.event.reply_to)), stale))
        else:
            self.tell_prefill(message.event)

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
            case ((dec.SendConfirm(fetch_id) | dec.SendTake(fetch_id)), _):
                self.tell_decode(dec.LeaseConfirmed(fetch_id))
            case _, Granted() as granted:
                ticket = self.targets[sent.fetch_id].source.ticket
                claimed = ticket if isinstance(sent, dec.SendClaim) else None
                self.tell_decode(dec.LeaseGranted(sent.fetch_id, sent_at, granted, claimed))

    def recent_source(self, back: int) -> Source:
        return list(self.sources.values())[-1 - back % len(self.sources)]

    def overwrite(self, source: Source, outcome: Outcome) -> None:
        source.outcome = outcome
        self.memory |= dict.fromkeys(source.slots(), "overwritten")

    def cut(self, source: Source) -> None:
        """The memory of a live offer is zeros, and who reads it in place finds out, in the end."""
        source.is_cut = True
        self.memory |= dict.fromkeys(source.slots(), "zeros")

    def tell_prefill(self, event: pre.Event) -> None:
        self.num_events += 1
        with self.telling():
            for command in self.prefill.handle(event, self.now):
                self.obey_prefill(command)

    def obey_prefill(self, command: pre.Command) -> None:
        match command:
            case pre.SendReply(int(number), body):
                self.wire.append(Answer(number, body))
            case pre.Refuse(int(number), error):
                self.wire.append(Answer(number, error))
            case pre.ReportReleased(_, offer_id, _, outcome):
                source = self.sources[offer_id]
                assert source.outcome is None, "released twice"
                self.overwrite(source, outcome)

    def tell_decode(self, event: dec.Event) -> None:
        self.num_events += 1
        with self.telling():
            for command in self.decode.handle(event, self.now):
                self.obey_decode(command)
            for target in self.targets.values():
                assert target.outcome or self.now < self.ends_at(target)

    def ends_at(self, target: Target) -> float:
        """Its deadline, and a little more while it waits for a yes."""
        sent = [command for _, command in self.asked.values()]
        yes = [one for one in sent if isinstance(one, dec.SendConfirm | dec.SendTake)]
        is_asked = any(self.targets.get(one.fetch_id) is target for one in yes)
        return target.deadline + (FETCH_LIMITS.confirm_grace_s if is_asked else 0.0)

    def obey_decode(self, command: dec.Command) -> None:
        match command:
            case dec.ReadChunk(fetch_id):
                assert fetch_id not in self.reads, "one chunk at a time"
                self.targets[fetch_id].start_chunk(command)
                self.reads[fetch_id] = command
            case dec.ReportFetched():
                self.check_report(command)
            case dec.ReportBlocksFreed(fetch_id):
                assert fetch_id not in self.reads
                self.targets[fetch_id].blocks_free = True
            case dec.Refuse(reply_to=str(fetch_id), error=error):
                assert error.code is ErrorCode.BUSY, error
                del self.targets[fetch_id]
            case dec.SendRelease(ticket, epoch, token):
                self.send(ticket, pre.Returned(ticket.offer_id, epoch, token, 0))
            case (
                dec.ResolvePeer()
                | dec.SendClaim()
                | dec.SendRenew()
                | dec.SendConfirm()
                | dec.SendTake()
            ):
                self.ask(command)

    def check_report(self, report: dec.ReportFetched) -> None:
        target = self.targets[report.fetch_id]
        assert target.outcome is None, "reported twice"
        target.outcome, target.blocks_free = report.outcome, report.blocks_free
        if report.outcome is Outcome.COMPLETED:
            assert target.landed == target.wanted(), "wrong tokens"
            outcomes = [t.outcome for t in self.targets.values() if t.source is target.source]
            num_readers = outcomes.count(Outcome.COMPLETED)
            assert num_readers <= target.source.readers, "more believe that they have it than may"

    def ask(self, sent: Sent) -> None:
        self.num_asked += 1
        self.asked[self.num_asked] = (self.now, sent)
        ticket, number = self.targets[sent.fetch_id].source.ticket, self.num_asked
        match sent:
            case dec.ResolvePeer():
                self.wire.append(Answer(number, Message()))
            case dec.SendClaim():
                claim = pre.Claimed(
                    ticket.offer_id,
                    ticket.secret,
                    sent.fetch_id,
                    FETCH_LIMITS.lease_s,
                    f"token-{number}",
                    number,
                )
                self.send(ticket, claim)
            case dec.SendRenew(epoch=epoch, token=token, known_blocks=known):
                lease_s = FETCH_LIMITS.lease_s
                renewed = pre.Renewed(ticket.offer_id, epoch, token, lease_s, known, number)
                self.send(ticket, renewed)
            case dec.SendConfirm(epoch=epoch, token=token):
                self.send(ticket, pre.Confirmed(ticket.offer_id, epoch, token, number))
            case dec.SendTake(fetch_id, tables):
                right = (ticket.offer_id, ticket.secret, fetch_id, f"own-{fetch_id}")
                self.send(ticket, pre.Taken(*right, tables, number))

    def send(self, ticket: Ticket, event: pre.RequestEvent) -> None:
        self.wire.append(Request(ticket.agent_boot, event))
