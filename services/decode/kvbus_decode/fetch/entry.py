"""One fetch: what was asked for, how far it is, and how it ends."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Fetched, Outcome, StageTimes
from kvbus.protocol.message import Request
from kvbus.protocol.peer import Claim, CommitAnswer, Granted, Take
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
    """What was ready is read; the prefill engine still computes, or other decode agents read."""

    READING = "reading"
    """A chunk, all that was ready when it began, is on its way into the blocks."""

    TAKING = "taking"
    """All bytes have landed; only the prefill agent knows whether they are good."""

    RETRYING = "retrying"
    """An attempt has failed: its transfers end, then a pause passes, then the next one starts."""

    DRAINING = "draining"
    """The fetch has ended and said so, but bytes can still land: its blocks are not free."""

    COMPLETED = "completed"
    """The KV is valid."""

    FAILED = "failed"
    """There is no KV, and nothing in flight."""

    CANCELLED = "cancelled"
    """The engine did not want the KV any more; nothing is in flight."""


STAGES = tuple(FetchState)[: list(FetchState).index(FetchState.DRAINING)]
ENDS = (FetchState.COMPLETED, FetchState.FAILED, FetchState.CANCELLED)
UNDER_WAY = (FetchState.CLAIMING, FetchState.READING, FetchState.TAKING)
LEASED = (FetchState.CLAIMING, FetchState.WAITING, FetchState.READING)
"""States that a lease must outlast."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the table; durations in seconds.

    A fetch whose transfers cannot be stopped counts in ``max_fetches`` until they end. To begin, it
    needs one of ``num_places``, and has it for at most ``patience_s``. An agent that does not
    answer a handshake or a claim within ``request_timeout_s`` is not there. A read without a lease
    asks for one when it has taken ``claim_after_s``. What was asked by the deadline may be answered
    ``take_grace_s`` after it. Readers are of the process ``reader_boot`` of ``reader_agent``.
    """

    max_fetches: int = 4096
    num_places: int = 32
    patience_s: float = 1.0
    max_retired_bytes: int = 32 << 20
    lease_s: float = 10.0
    request_timeout_s: float = 5.0
    busy_retry_s: float = 0.05
    claim_after_s: float = 0.05
    take_grace_s: float = 1.0
    reader_agent: str = ""
    reader_boot: str = ""


Context = AnyContext[FetchLimits]


@dataclass(slots=True)
class FetchEntry:
    """One fetch; ``deadline`` is absolute, and so is ``answer_until``, the end of its grace.

    ``question`` is what the prefill agent was asked last and has not answered, ``ask_at`` when it
    is asked next. ``hinted`` is True when news came in between: the answer may be older.
    ``held`` is the lease, which ends no later at ``lease_ends_at`` than at the prefill agent.
    Requests name the process ``boot``, which the last handshake found, as it did ``home_nixl``, the
    NIXL agent there, and ``elsewhere``, the memory of the prefill engine's ranks at other agents.
    The tokens that count were read from ``nixl_agent``; it is empty if none were read with NIXL.
    ``attempts`` counts the attempts that started;
    the last one that failed did so in state ``failed_in``.
    A fetch that an earlier process of the agent had is ``repeated``, until the prefill agent
    reports that this process did not commit it. A fetch is ``unconfirmed`` after a commit that got
    no answer; the next attempt repeats it.
    ``num_ready`` and ``sealed`` are what the last grant said of the offer, ``in_doubt`` while only
    the ticket says so. ``num_read`` tokens have landed. In flight are the ``chunk``, and while
    ``others_read`` the parts of other agents. ``place`` is None before its turn, and after it let
    others begin; then ``place_until`` has no meaning.
    """

    requested: ev.Requested
    deadline: float
    answer_until: float
    boot: str
    elsewhere: tuple[str, ...]
    home_nixl: str
    state: FetchState
    entered_at: float
    stages_s: dict[FetchState, float] = field(default_factory=dict)
    question: Request[Any] | None = None
    ask_at: float | None = None
    hinted: bool = False
    held: Granted | None = None
    lease_ends_at: float = 0.0
    place: int | None = None
    place_until: float = 0.0
    tables: dict[str, BlockTable] = field(default_factory=dict)
    num_ready: int = 0
    sealed: bool = False
    in_doubt: bool = False
    num_read: int = 0
    last_was_read: bool = False
    attempts: int = 1
    failed_in: FetchState | None = None
    repeated: bool = False
    unconfirmed: bool = False
    nixl_agent: str = ""
    chunk: ev.ReadChunk | None = None
    others_read: bool = False
    num_bytes: int = 0
    path: str = ""
    ends_as: FetchState = FetchState.COMPLETED
    error: KVBusError | None = None
    story: Story = field(default_factory=Story, compare=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.requested.fetch_id

    @property
    def turn(self) -> Key:
        return Key(self.requested.ticket.agent_boot, self.requested.asked.priority)

    @property
    def read_to(self) -> int:
        return self.requested.asked.first_token + self.num_read

    @property
    def in_flight(self) -> bool:
        """Whether something may write into its blocks, here or by another agent."""
        return self.chunk is not None or self.others_read

    @property
    def is_over(self) -> bool:
        """Whether it has ended and its blocks are free."""
        return self.state in ENDS

    @property
    def is_claiming(self) -> bool:
        return isinstance(self.question, Claim)

    @property
    def is_stale(self) -> bool:
        """Whether its tokens came from a data process that the prefill agent has replaced."""
        return self.nixl_agent not in ("", self.home_nixl)

    # A yes ends the offer, and its reply takes a while. Who gives up at the deadline while it is on
    # its way fails a fetch that has all its bytes, and an offer is gone that cannot be read again:
    #
    #     reader   last byte ─▶ take ──────┐        deadline      ┌─▶ completed, a little late
    #     offer                            └▶ yes: released ──────┘
    #     time     ─────────────────────────────────────┼──────────────────┤ answer_until
    #
    # So the answer to what was asked by the deadline counts for a grace after it. Nothing new is
    # asked then.
    @property
    def is_undecided(self) -> bool:
        """Whether it was asked for a yes, and no answer has come."""
        return self.unconfirmed or isinstance(self.question, Take)

    @property
    def ends_at(self) -> float:
        """When it has failed, whatever happens after that."""
        return self.answer_until if isinstance(self.question, Take) else self.deadline

    @property
    def due_at(self) -> float | None:
        """When the table must look at it again; None while only the end of its reads can end it."""
        if self.state is FetchState.DRAINING or self.state in ENDS:
            return None
        times = [self.ends_at]
        if self.place is not None:
            times.append(self.place_until)
        if self.ask_at is not None:
            times.append(self.ask_at)
        if self.held is not None and self.state in LEASED:
            times.append(self.lease_ends_at)
        return min(times)

    def makes_progress(self, now: float) -> bool:
        """Whether it keeps its place: it does nothing while it waits for tokens, or has stalled."""
        waits = self.ask_at is not None and self.chunk is None
        return self.state in UNDER_WAY and not waits and now < self.place_until

    def next_chunk(self) -> ev.ReadChunk | None:
        """All that is ready and not read yet, or the state that came with the seal, or None.

        Less of it when the engine wants smaller chunks. None though the offer is sealed means that
        everything was read.
        """
        asked, has_state = self.requested.asked, self.requested.has_state
        wanted, chunk_tokens, start = asked.num_tokens, asked.chunk_tokens, self.read_to
        stop = min(self.num_ready, wanted)
        if chunk_tokens:
            stop = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        does_more = has_state or (asked.zero_tail and wanted > asked.first_token)
        lacks_last = self.sealed and does_more and not self.last_was_read
        if stop <= start and not lacks_last:
            return None
        last = self.sealed and stop == wanted
        epoch, token = (self.held.epoch, self.held.token) if self.held else (0, "")
        return ev.ReadChunk(self.requested, epoch, token, dict(self.tables), start, stop, last)

    def retire(self) -> None:
        """Keep no tables, and no request."""
        self.tables, self.held, self.question = {}, None, None
        requested = self.requested
        self.requested = replace(
            requested,
            asked=replace(requested.asked, ticket={}, tables={}),
            ticket=replace(requested.ticket, blocks=""),
            reply_to=None,
            resources=None,
            ahead=None,
        )

    def enter(self, state: FetchState, now: float) -> None:
        """Move to ``state`` and account the time in the one before."""
        if self.state in STAGES:
            spent = self.stages_s.get(self.state, 0.0) + now - self.entered_at
            self.stages_s[self.state] = spent
        self.state, self.entered_at = state, now

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
        asked = self.requested.asked
        wanted = asked.num_tokens
        if granted.sealed and asked.at_most and granted.num_tokens < wanted:
            wanted = max(asked.first_token, granted.num_tokens)
            self.requested = replace(self.requested, asked=replace(asked, num_tokens=wanted))
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
        """The lease is ours, to use or to give back; it is renewed after a third of its time."""
        self.held, self.question = granted, None
        self.lease_ends_at = sent_at + granted.lease_s
        self.ask_at = sent_at + granted.lease_s / 3

    def drop_attempt(self) -> None:
        """Forget what the next attempt finds again; keep the tokens that count.

        A commit proves that the offer held since its first byte was read. That is not so for what
        only a ticket named, unless the commit shows these tables.
        """
        self.question, self.held, self.hinted = None, None, False
        self.requested = replace(self.requested, has_route=False, ahead=None)
        if self.unconfirmed:
            return
        self.tables = {}
        if self.in_doubt:
            self.in_doubt = self.sealed = False
            self.num_ready = 0
            self.read_again()

    def note_committed(self, answer: CommitAnswer) -> None:
        """An earlier process of the agent has all tokens: those that the offer had at its seal."""
        asked = self.requested.asked
        self.error = None
        if asked.at_most and answer.num_tokens < asked.num_tokens:
            wanted = max(asked.first_token, answer.num_tokens)
            self.requested = replace(self.requested, asked=replace(asked, num_tokens=wanted))

    def read_again(self) -> None:
        """Count no token as read."""
        self.num_read, self.last_was_read, self.unconfirmed = 0, False, False
        self.nixl_agent = ""

    def land(self, ended: ev.ReadEnded) -> None:
        """The chunk is over, and its tokens count when all its bytes have landed; or the parts."""
        self.num_bytes += ended.num_bytes
        if ended.elsewhere:
            self.others_read, self.path = False, self.path or ended.path
            return
        chunk, self.chunk, self.path = self.chunk, None, ended.path or self.path
        if chunk is not None and ended.error is None:
            self.num_read += chunk.stop - chunk.start
            self.last_was_read = chunk.last
            self.nixl_agent = ended.nixl_agent or self.nixl_agent

    def report(self, stage: FetchState, undecided: bool = False) -> ev.ReportFetched:
        """How the fetch ended; ``stage`` is the state that it ended in."""
        error, requested = self.error, self.requested
        fetched = Fetched(
            fetch_id=requested.asked.fetch_id,
            request_id=requested.ticket.request_id,
            outcome=Outcome(self.ends_as.value),
            stage=stage.value,
            blocks_free=self.state is not FetchState.DRAINING,
            code="" if error is None else error.code.value,
            message="" if error is None else error.message,
            num_bytes=self.num_bytes,
            path=self.path,
            stages_s=StageTimes(**{state.value: spent for state, spent in self.stages_s.items()}),
            num_tokens=requested.asked.num_tokens,
            attempts=self.attempts,
        )
        return ev.ReportFetched(requested, fetched, self.held is not None, undecided)


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
