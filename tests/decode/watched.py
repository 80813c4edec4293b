"""One fetch as it is seen from outside: what it was told, what it asked for, what has landed.

Refuses to look into the table: only events and commands count. An `Offered` is the truth at the
prefill agent, of which the table knows what the last grant said.
"""

from dataclasses import dataclass, field

import pytest

from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome, Rendezvous, Ticket
from kvbus_decode.fetch import events as ev

BLOCK_SIZE = 8
NUM_TOKENS = 32
SECRET = "secret-of-a-ticket"


def token_of(epoch: int) -> str:
    """Each lease has a token of its own."""
    return f"token-of-epoch-{epoch}"


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def blocks(start: int, stop: int) -> BlockTable:
    """Blocks [start, stop) of the offer: block i of the request is block 100 + i of the cache."""
    return BlockTable.of(range(100 + start, 100 + stop), first_block=start)


def ticket_of(fetch_id: str, boot: str) -> Ticket:
    """Each fetch has an offer of its own, under its own name."""
    return Ticket(
        "p", boot, "tcp://p", "engine-p", "e-boot", fetch_id, "request", NUM_TOKENS, SECRET
    )


def rendezvous_of(fetch_id: str) -> Rendezvous:
    """The same, before there is an offer."""
    return Rendezvous(f"transfer-id-of-{fetch_id}", "tcp://p:1", request_id="request")


@dataclass
class Offered:
    """The offer that a fetch reads: tokens become ready in order, until the seal."""

    num_ready: int = 0
    sealed: bool = False

    def grow(self, num_more: int, *, seal: bool) -> None:
        if not self.sealed:
            self.num_ready += num_more
            self.sealed = seal

    def granted(self, epoch: int, known_blocks: int) -> Granted:
        """The reply to a claim or renewal that the prefill agent handles now."""
        more = {"full": blocks(known_blocks, max(known_blocks, num_blocks(self.num_ready)))}
        return Granted(epoch, 2.0, self.num_ready, self.sealed, more, token_of(epoch))


@dataclass
class Watched:
    """What was seen of one fetch; ``granted`` and ``given_back`` are epochs.

    ``has_news`` while the engine was not told what landed. ``told_*`` is what the last grant said.
    ``hinted`` is True from a hint until the next question about the offer is asked; ``superseded``
    are epochs that the prefill agent itself took back. ``confirm_lost`` when no reply came to the
    last confirm. ``in_doubt`` while nobody but the ticket has told that the offer is sealed.
    ``met`` once it has a ticket. ``asks_by`` is when a renewal that found its agent busy is due.
    """

    requested: ev.Requested
    asked_at: float
    agent_boot: str
    offer: Offered = field(default_factory=Offered)
    met: bool = True
    queued_at: float | None = None
    begun_at: float | None = None
    told_ready: int = 0
    told_sealed: bool = False
    told_blocks: int = 0
    renew_at: float = 0.0
    hinted: bool = False
    asks_by: float | None = None
    granted: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)
    superseded: set[int] = field(default_factory=set)
    chunk: ev.ReadChunk | None = None
    chunk_started_at: float = 0.0
    num_chunks: int = 0
    num_blocks_held: int = 0
    read_to: int = 0
    state_was_read: bool = False
    has_news: bool = False
    num_bytes: int = 0
    path: str = ""
    reading_s: float = 0.0
    num_aborts: int = 0
    confirm_asked: bool = False
    confirm_lost: bool = False
    confirmed: bool = False
    in_doubt: bool = False
    cancelled: bool = False
    report: ev.ReportFetched | None = None
    blocks_freed: bool = False

    def __post_init__(self) -> None:
        self.read_to = self.requested.first_token
        if self.requested.ahead is not None:
            self.in_doubt = True
            self.told_ready, self.told_sealed = NUM_TOKENS, True
            self.told_blocks = num_blocks(NUM_TOKENS)

    @property
    def deadline(self) -> float:
        return self.asked_at + self.requested.timeout_s

    @property
    def listens(self) -> bool:
        """News still matter: the fetch has not ended, and does not only wait for a yes."""
        return self.report is None and not self.confirm_asked

    @property
    def in_flight(self) -> bool:
        return self.chunk is not None

    def is_told(self, sent_at: float, granted: Granted) -> None:
        """The grant is about to be handed to the table; the ticket may have told it before."""
        self.granted.add(granted.epoch)
        if self.listens:
            self.renew_at = sent_at + granted.lease_s / 3
            if self.in_doubt:
                self.in_doubt = not granted.sealed
                return
            self.told_ready, self.told_sealed = granted.num_tokens, granted.sealed
            self.told_blocks += sum(len(table) for table in granted.tables.values())

    def start_chunk(self, chunk: ev.ReadChunk, now: float) -> None:
        """Check that the chunk follows the one before, and is all that is ready."""
        assert self.granted or self.requested.ahead, "read of what nobody has told"
        assert (chunk.epoch > 0) == bool(self.granted)
        assert not self.in_flight
        assert not self.confirm_asked
        assert chunk.start == self.read_to, "every token once, and in order"
        is_ahead = self.requested.ahead is not None
        assert is_ahead or chunk.stop <= self.offer.num_ready, "read before it was ready"
        assert chunk.stop == self.next_stop(), "not all that is ready"
        assert chunk.last == (self.told_sealed and chunk.stop == NUM_TOKENS)
        assert not chunk.last or is_ahead or self.offer.sealed, "the last chunk before the seal"
        if chunk.start == chunk.stop:
            assert chunk.last
            assert self.requested.has_state
            assert self.requested.first_token < NUM_TOKENS
            assert not self.state_was_read
        self.chunk, self.chunk_started_at = chunk, now
        self.num_chunks += 1
        self.num_blocks_held = self.check_tables(chunk)

    def next_stop(self) -> int:
        """All that is ready, or up to the end of a chunk of the size that the engine wants."""
        stop, size = min(self.told_ready, NUM_TOKENS), self.requested.chunk_tokens
        ends = range(0, NUM_TOKENS + 1, size) if size else []
        return min([stop, *(end for end in ends if end > self.read_to)])

    def check_tables(self, chunk: ev.ReadChunk) -> int:
        """The blocks of the offer, at least those of the chunk; returns how many."""
        held = chunk.tables["full"]
        assert held == blocks(0, len(held))
        assert num_blocks(chunk.stop) <= len(held) <= self.told_blocks
        return len(held)

    def end_chunk(self, ended: ev.ChunkRead, now: float) -> None:
        """The chunk is about to end."""
        assert self.chunk is not None
        assert self.check_tables(self.chunk) == self.num_blocks_held, "grown under the read"
        chunk, self.chunk = self.chunk, None
        if self.report is None:
            self.num_bytes += ended.num_bytes
            self.path = ended.path or self.path
            self.reading_s += now - self.chunk_started_at
        if ended.error is None:
            self.read_to, self.state_was_read = chunk.stop, chunk.last
            self.has_news = self.report is None and self.requested.chunk_tokens > 0

    def is_landed(self, num_tokens: int) -> None:
        """The engine is told so; once for each chunk."""
        assert self.has_news, "told of what did not land"
        assert num_tokens == self.read_to
        self.has_news = False

    @property
    def nothing_is_left(self) -> bool:
        """All that was asked for is there, and the offer was sealed when the last of it was."""
        requested = self.requested
        wants_state = requested.has_state and requested.first_token < NUM_TOKENS
        read = self.read_to == NUM_TOKENS and (self.state_was_read or not wants_state)
        return self.told_sealed and read

    def ask_take(self, take: ev.SendTake) -> None:
        """A confirm of a fetch that never had a lease, or only that of an open offer."""
        assert self.in_doubt, "the lease is to be confirmed"
        assert take.tables == {"full": blocks(0, num_blocks(NUM_TOKENS))}
        self.ask_yes()

    def ask_confirm(self) -> None:
        assert not self.in_doubt, "nobody has compared the blocks"
        assert self.offer.sealed
        self.ask_yes()

    def ask_yes(self) -> None:
        assert not self.in_flight
        assert not self.confirm_asked or self.confirm_lost, "confirmed again without a reason"
        assert self.nothing_is_left, "confirmed before everything was read"
        self.confirm_asked, self.confirm_lost = True, False

    @property
    def is_completed(self) -> bool:
        """The engine was told that it has the KV; a yes that comes after another end is no news."""
        return self.report is not None and self.report.outcome is Outcome.COMPLETED

    def end(self, report: ev.ReportFetched, now: float) -> None:
        """Check what the engine is told."""
        assert self.report is None, "reported twice"
        assert report.blocks_free == (not self.in_flight)
        assert (report.outcome is Outcome.CANCELLED) == self.cancelled
        assert (report.outcome is Outcome.COMPLETED) == (report.error is None)
        if report.outcome is Outcome.COMPLETED:
            assert self.confirmed, "completed without the prefill agent's word"
        assert (report.num_bytes, report.path) == (self.num_bytes, self.path)
        assert report.ahead == (self.requested.ahead is not None and self.begun_at is not None)
        self.check_stages(report, now)
        self.report = report

    def check_stages(self, report: ev.ReportFetched, now: float) -> None:
        """Every moment is in one stage; reading is when a chunk was in flight, queued the wait."""
        spent, reading_s = report.stages_s, self.reading_s
        if self.in_flight:
            reading_s += now - self.chunk_started_at
        assert spent.total == pytest.approx(now - self.asked_at)
        queued_at = now if self.queued_at is None else self.queued_at
        begun_at = now if self.begun_at is None else self.begun_at
        assert spent.queued == pytest.approx(begun_at - queued_at)
        assert spent.reading == pytest.approx(reading_s)

    def check_idle(self, *, is_asking: bool) -> None:
        """With the lease held and nothing in flight, only what the table cannot know is waited for.

        ``is_asking`` when a claim or a renewal is under way.
        """
        assert not self.has_news, "a chunk landed, and the engine was not told"
        if not (self.listens and self.granted):
            return
        if not self.in_flight:
            assert self.read_to >= min(self.told_ready, NUM_TOKENS), "ready, and not read"
            assert not self.told_sealed, "sealed, and neither read nor confirmed"
        assert is_asking or not self.hinted or self.told_sealed, "a hint was forgotten"
