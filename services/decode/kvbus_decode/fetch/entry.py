"""One fetch: what was asked for, how far it is, and how it ends."""

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Fetched, Outcome, StageTimes
from kvbus.protocol.peer import Granted
from kvbus.table import Context as AnyContext
from kvbus.table import Key, Story
from kvbus_decode.fetch import events as ev


class FetchState(StrEnum):
    """Where a fetch is. The last three are ends; draining is one as well, but for its blocks."""

    MEETING = "meeting"
    """There is no ticket yet: the prefill agent is asked for it."""

    RESOLVING = "resolving"
    """The prefill agent is being connected to, and asked whether its engine fits ours."""

    QUEUED = "queued"
    """As many fetches as may be are under way: it waits for its turn, without a lease."""

    CLAIMING = "claiming"
    """The lease is waited for: it was asked for, or is again as another reader has it."""

    WAITING = "waiting"
    """What was ready is read; the prefill engine still computes, or other agents of ours read."""

    READING = "reading"
    """A chunk, all that was ready when it began, is on its way into the blocks."""

    TAKING = "taking"
    """All bytes have landed; only the prefill agent knows whether they are good."""

    DRAINING = "draining"
    """The fetch has ended and said so, but bytes can still land: its blocks are not free."""

    COMPLETED = "completed"
    """The KV is valid."""

    FAILED = "failed"
    """There is no KV, and nothing in flight."""

    CANCELLED = "cancelled"
    """The engine did not want the KV any more; nothing is in flight."""


STAGES = (
    FetchState.MEETING,
    FetchState.RESOLVING,
    FetchState.QUEUED,
    FetchState.CLAIMING,
    FetchState.WAITING,
    FetchState.READING,
    FetchState.TAKING,
)
ENDS = (FetchState.COMPLETED, FetchState.FAILED, FetchState.CANCELLED)
UNDER_WAY = (FetchState.CLAIMING, FetchState.READING, FetchState.TAKING)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the table; durations in seconds.

    A fetch whose transfers cannot be stopped counts in ``max_fetches`` until they end. To begin, it
    needs one of ``num_places``, and has it for at most ``patience_s``. A read without a lease asks
    for one when it has taken ``claim_after_s``. What was asked by the deadline may be answered
    ``take_grace_s`` after it. Readers are of the process ``reader_boot`` of ``reader_agent``.
    """

    max_fetches: int = 4096
    num_places: int = 32
    patience_s: float = 1.0
    max_retired: int = 65_536
    max_retired_bytes: int = 32 << 20
    lease_s: float = 10.0
    request_timeout_s: float = 5.0
    busy_retry_s: float = 0.05
    claim_after_s: float = 0.01
    take_grace_s: float = 1.0
    reader_agent: str = ""
    reader_boot: str = ""


Context = AnyContext[FetchLimits]


@dataclass(slots=True)
class ReaderLease:
    """The lease as this side sees it: it ends no later here than at the prefill agent."""

    epoch: int
    token: str = field(repr=False)
    expires_at: float
    renew_at: float
    renewing: bool = False


@dataclass(slots=True)
class FetchEntry:
    """One fetch; ``deadline`` is absolute, and so is ``answer_until``, the end of its grace.

    ``num_ready`` and ``sealed`` are what the last grant said of the offer, ``read_to`` is where the
    chunks that have landed end. ``chunk`` is set from ReadChunk to ChunkRead. ``claiming`` while a
    claim is under way; ``ask_again_at`` is when the next is due, or the next take. ``hinted`` is
    True when news came in while a claim, a renewal or a take was under way, whose reply may be
    older. ``in_doubt`` while only the ticket says what the offer is.
    ``routers_names`` are those of its rendezvous, by which the router knows it when it has met.
    ``asking`` while other agents of the engine may write for their parts.
    ``place`` is None before its turn, and after it let others begin; then ``place_until`` has no
    meaning.
    """

    requested: ev.Requested
    deadline: float
    answer_until: float
    state: FetchState = FetchState.RESOLVING
    entered_at: float = 0.0
    stages_s: dict[FetchState, float] = field(default_factory=dict)
    held: ReaderLease | None = None
    claiming: bool = False
    ask_again_at: float | None = None
    place: int | None = None
    place_until: float = 0.0
    tables: dict[str, BlockTable] = field(default_factory=dict)
    num_ready: int = 0
    sealed: bool = False
    num_read: int = 0
    last_was_read: bool = False
    chunk: ev.ReadChunk | None = None
    asking: bool = False
    hinted: bool = False
    num_bytes: int = 0
    path: str = ""
    read_ahead: bool = False
    in_doubt: bool = False
    ends_as: FetchState = FetchState.FAILED
    error: KVBusError | None = None
    routers_names: tuple[str, ...] = field(default=(), repr=False)
    story: Story = field(default_factory=Story, compare=False)
    key: str = field(init=False)
    fetch_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.fetch_id = self.requested.fetch_id

    @property
    def agent_boot(self) -> str:
        """The process that has the offer."""
        return self.requested.ticket.agent_boot

    @property
    def turn(self) -> Key:
        """What it waits for a place under."""
        return Key(self.agent_boot, self.requested.asked.priority)

    @property
    def read_to(self) -> int:
        """Tokens up to here are in the engine's blocks."""
        return self.requested.asked.first_token + self.num_read

    @property
    def in_flight(self) -> bool:
        """Whether something may write into its blocks, here or by another agent."""
        return self.chunk is not None or self.asking

    def next_chunk(self) -> ev.ReadChunk | None:
        """All that is ready and not read yet, or the state that came with the seal, or None.

        Less of it when the engine wants smaller chunks. None though the offer is sealed means that
        everything was read.
        """
        asked, has_state = self.requested.asked, self.requested.has_state
        wanted, chunk_tokens = asked.num_tokens, asked.chunk_tokens
        stop = min(self.num_ready, wanted)
        if chunk_tokens:
            stop = min(stop, (self.read_to // chunk_tokens + 1) * chunk_tokens)
        does_more = (has_state or asked.zero_tail) and wanted > asked.first_token
        lacks_last = self.sealed and does_more and not self.last_was_read
        if stop <= self.read_to and not lacks_last:
            return None
        last = self.sealed and stop == wanted
        epoch, token = self.lease
        return ev.ReadChunk(
            self.fetch_id, epoch, token, dict(self.tables), self.read_to, stop, last
        )

    @property
    def lease(self) -> tuple[int, str]:
        """The epoch and the token of the lease; 0 and nothing before there is one."""
        return (self.held.epoch, self.held.token) if self.held else (0, "")

    @property
    def is_over(self) -> bool:
        """Whether it has ended and its blocks are free."""
        return self.state in ENDS

    @property
    def due_at(self) -> float | None:
        """When somebody must look at this fetch again; None while only its read can end it."""
        if self.state is FetchState.DRAINING or self.state in ENDS:
            return None
        times = [self.ends_at]
        if self.place is not None:
            times.append(self.place_until)
        if self.ask_again_at is not None:
            times.append(self.ask_again_at)
        if self.held is not None and self.state is not FetchState.TAKING:
            times.append(self.held.expires_at)
            if not self.held.renewing:
                times.append(self.held.renew_at)
        return min(times)

    # A yes ends the offer, and its reply takes a while. Who gives up at the deadline while it is on
    # its way fails a fetch that has all its bytes, and an offer is gone that nobody can read again:
    #
    #     reader   last byte ─▶ take ──────┐        deadline      ┌─▶ completed, a little late
    #     offer                            └▶ yes: released ──────┘
    #     time     ─────────────────────────────────────┼──────────────────┤ answer_until
    #
    # So the answer to what was asked by the deadline counts for a grace after it. Nothing new is
    # asked then: a question that would time out after the deadline has until the end of the grace.
    @property
    def is_undecided(self) -> bool:
        """Whether it was asked for a yes, and no answer has come."""
        return self.state is FetchState.TAKING and self.ask_again_at is None

    @property
    def ends_at(self) -> float:
        """When it has failed, whatever happens after that."""
        return self.answer_until if self.is_undecided else self.deadline

    def makes_progress(self, now: float) -> bool:
        """Whether it keeps its place: it does nothing while it waits for tokens, or has stalled."""
        waits = self.ask_again_at is not None and self.chunk is None
        is_active = self.state in UNDER_WAY and not waits
        return is_active and now < self.place_until

    def request_timeout_s(self, at: Context) -> float:
        """How long one request for this fetch may take."""
        return max(1e-3, min(at.limits.request_timeout_s, self.deadline - at.now))

    def yes_timeout_s(self, at: Context) -> float:
        """How long a question for the yes may take: it is asked again before the deadline only."""
        ends_in_time = at.now + at.limits.request_timeout_s < self.deadline
        return at.limits.request_timeout_s if ends_in_time else self.answer_until - at.now

    def retire(self) -> None:
        """Keep no tables, and not the request that is answered."""
        self.tables = {}
        requested = self.requested
        self.requested = replace(
            requested,
            asked=replace(requested.asked, ticket={}, tables={}),
            ticket=replace(requested.ticket, blocks=""),
            reply_to=None,
            route=None,
            choice=None,
            ahead=None,
        )

    def enter(self, state: FetchState, now: float) -> None:
        """Move to ``state`` and account the time in the one before."""
        if self.state in STAGES:
            spent = self.stages_s.get(self.state, 0.0) + now - self.entered_at
            self.stages_s[self.state] = spent
        self.state, self.entered_at = state, now

    def know(self, ahead: ev.Ahead) -> None:
        """Take the ticket's word for what the offer is; the prefill agent's follows."""
        self.read_ahead, self.in_doubt, self.sealed = True, True, True
        self.tables, self.num_ready = dict(ahead.tables), self.requested.ticket.num_tokens

    def hold(self, sent_at: float, granted: Granted) -> None:
        """Take over what a claim or a renewal granted.

        An offer only grows, up to its seal; what was read of it would be of another one. Raises
        `RemoteError` when it takes back what an earlier grant or the ticket said, `LocalError` when
        the offer will never have the tokens, `GeometryError` when its blocks do not follow. The
        ticket may be faster than the seal that it tells of: until then only the lease counts.
        """
        before = self.held
        self.receive(sent_at, granted)
        if before is not None and before.epoch != granted.epoch:
            raise _taken_back("lease epoch", before.epoch, granted.epoch)
        if self.in_doubt and not granted.sealed:
            return
        if granted.num_tokens < self.num_ready:
            raise _taken_back("number of tokens", self.num_ready, granted.num_tokens)
        if self.sealed and not granted.sealed:
            raise _taken_back("seal", self.sealed, granted.sealed)
        wanted = self.requested.asked.num_tokens
        if granted.sealed and granted.num_tokens < wanted:
            message = f"the offer has {granted.num_tokens} tokens, {wanted} were asked for"
            raise LocalError(message, num_tokens=granted.num_tokens)
        if granted.sealed and self.requested.has_state and granted.num_tokens > wanted:
            message = f"the state is that of token {granted.num_tokens}, not of token {wanted}"
            raise LocalError(message, num_tokens=granted.num_tokens)
        if self.in_doubt:
            if granted.tables != self.tables:
                raise _other_blocks()
            self.in_doubt = False
        else:
            for group, more in granted.tables.items():
                known = self.tables.get(group)
                self.tables[group] = more if known is None else known.extended(more)
        self.num_ready, self.sealed = granted.num_tokens, granted.sealed

    def receive(self, sent_at: float, granted: Granted) -> None:
        """The lease is ours, to use or to give back."""
        lease_s = granted.lease_s
        self.held = ReaderLease(
            granted.epoch, granted.token, sent_at + lease_s, sent_at + lease_s / 3
        )

    def land(self, ended: ev.ChunkRead) -> None:
        """The chunk is over; its tokens count when all its bytes have landed."""
        chunk, self.chunk = self.chunk, None
        self.num_bytes += ended.num_bytes
        self.path = ended.path or self.path
        if chunk is not None and ended.error is None:
            self.num_read += chunk.stop - chunk.start
            self.last_was_read = chunk.last

    def end_others(self, ended: ev.OthersEnded) -> None:
        """No other agent writes for it any more."""
        self.asking = False
        self.num_bytes += ended.num_bytes
        self.path = self.path or ended.path

    def report(
        self,
        outcome: Outcome,
        stage: FetchState,
        *,
        blocks_free: bool,
        undecided: bool = False,
    ) -> ev.ReportFetched:
        """How the fetch ended; ``stage`` is the state that it ended in."""
        error = self.error
        fetched = Fetched(
            fetch_id=self.requested.asked.fetch_id,
            request_id=self.requested.ticket.request_id,
            outcome=outcome,
            stage=stage.value,
            blocks_free=blocks_free,
            code="" if error is None else error.code.value,
            message="" if error is None else error.message,
            num_bytes=self.num_bytes,
            path=self.path,
            stages_s=StageTimes(**{state.value: spent for state, spent in self.stages_s.items()}),
        )
        return ev.ReportFetched(
            fetch_id=self.fetch_id,
            engine_id=self.requested.engine_id,
            fetched=fetched,
            reply_to=self.requested.reply_to,
            ahead=self.read_ahead,
            leased=self.held is not None,
            undecided=undecided,
        )


def _other_blocks() -> RemoteError:
    return RemoteError(
        "the ticket names other blocks than the offer has: it was altered on its way here",
        code=ErrorCode.GEOMETRY,
    )


def _taken_back(what: str, before: int, after: int) -> RemoteError:
    return RemoteError(
        f"the prefill agent took back the {what} of an offer: it was {before}, now it is {after}",
        code=ErrorCode.INVALID,
        before=before,
        after=after,
    )
