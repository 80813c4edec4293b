"""State of one fetch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.fair import Key
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Fetched, Outcome, StageTimes
from kvbus.protocol.message import Request
from kvbus.protocol.peer import Acquire, Commit, CommitAnswer, Granted
from kvbus.table.table import Context as AnyContext
from kvbus.table.table import History
from kvbus_decode.fetch import events as ev

MAX_MOVES = 2


class FetchState(StrEnum):
    """State of a fetch; the end is reported before ``draining``."""

    AWAITING = "awaiting"
    """No ticket yet: the agent has sent `AwaitOffer` and waits for the ticket."""

    RESOLVING = "resolving"
    """The agent connects to the prefill agent, and a handshake checks that the engines fit."""

    QUEUED = "queued"
    """The fetch waits, without a lease, for a place."""

    ACQUIRING = "acquiring"
    """The agent waits for the lease, and retries while another reader holds it."""

    WAITING = "waiting"
    """All ready tokens are read. The prefill engine still computes, or parts are in flight."""

    READING = "reading"
    """A chunk is in flight into the blocks."""

    COMMITTING = "committing"
    """All bytes have landed. The prefill agent must confirm that they are valid."""

    RETRYING = "retrying"
    """An attempt has failed. The next one starts after its transfers have ended and a pause."""

    DRAINING = "draining"
    """The end is reported, but bytes can still land: the blocks are withheld."""

    COMPLETED = "completed"
    """The KV is valid."""

    FAILED = "failed"
    """There is no KV, and nothing is in flight."""

    CANCELLED = "cancelled"
    """The engine has cancelled the fetch, and nothing is in flight."""


STAGES = tuple(FetchState)[: list(FetchState).index(FetchState.DRAINING)]
ENDS = (FetchState.COMPLETED, FetchState.FAILED, FetchState.CANCELLED)
UNDER_WAY = (FetchState.ACQUIRING, FetchState.READING, FetchState.COMMITTING)
LEASED = (FetchState.ACQUIRING, FetchState.WAITING, FetchState.READING)
"""States in which the lease must be live."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of the table; ``max_fetches`` includes draining ones."""

    max_fetches: int = 4096
    num_places: int = 32
    place_timeout_s: float = 1.0
    max_retired_bytes: int = 32 << 20
    lease_s: float = 10.0
    request_timeout_s: float = 5.0
    busy_retry_s: float = 0.05
    acquire_after_s: float = 0.05
    commit_grace_s: float = 1.0
    reader_agent: str = ""
    reader_boot: str = ""


Context = AnyContext[FetchLimits]


@dataclass(slots=True)
class FetchEntry:
    """One fetch.

    A change of the offer since the ``question`` in flight sets ``refresh_needed``. With
    ``repeated``, an earlier process of this agent may have completed the fetch. With
    ``unconfirmed``, a `Commit` got no reply, and the next attempt repeats it. ``nixl_agent`` served
    the tokens that count. While ``is_speculative``, ``num_ready`` and ``sealed`` are from the
    ticket.
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
    request_sent: Request[Any] | None = None
    request_at: float | None = None
    refresh_needed: bool = False
    held: Granted | None = None
    lease_ends_at: float = 0.0
    place: int | None = None
    place_until: float = 0.0
    tables: dict[str, BlockTable] = field(default_factory=dict)
    num_ready: int = 0
    sealed: bool = False
    is_speculative: bool = False
    num_read: int = 0
    last_was_read: bool = False
    attempts: int = 1
    num_moves: int = 0
    failed_in: FetchState | None = None
    repeated: bool = False
    unconfirmed: bool = False
    nixl_agent: str = ""
    chunk: ev.ReadChunk | None = None
    remote_parts_read: bool = False
    num_bytes: int = 0
    path: str = ""
    ends_as: FetchState = FetchState.COMPLETED
    error: KVBusError | None = None
    history: History = field(default_factory=History, compare=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.requested.fetch_id

    @property
    def turn(self) -> Key:
        return Key(self.requested.ticket.agent_boot, self.requested.request.priority)

    @property
    def read_to(self) -> int:
        return self.requested.request.first_token + self.num_read

    @property
    def in_flight(self) -> bool:
        return self.chunk is not None or self.remote_parts_read

    @property
    def num_failed(self) -> int:
        """Attempts so far, without those that ended because the offer was parked."""
        return self.attempts - self.num_moves

    @property
    def is_over(self) -> bool:
        return self.state in ENDS

    @property
    def is_acquiring(self) -> bool:
        return isinstance(self.request_sent, Acquire)

    @property
    def is_stale(self) -> bool:
        """Whether its tokens came from a replaced data process."""
        return self.nixl_agent not in ("", self.home_nixl)

    # A granted `Commit` ends the offer, and its reply needs time. If the fetch failed at the
    # deadline while the reply is in flight, all its bytes would be lost: the offer cannot be read
    # again.
    #
    #     reader   last byte ─▶ Commit ────┐        deadline      ┌─▶ completed, a little late
    #     offer                            └▶ ok: released ───────┘
    #     time     ─────────────────────────────────────┼──────────────────┤ answer_until
    #
    # So the reply to a `Commit` that was sent by the deadline counts for a grace after it. The
    # agent sends no new request in the grace.
    @property
    def is_undecided(self) -> bool:
        return self.unconfirmed or isinstance(self.request_sent, Commit)

    @property
    def ends_at(self) -> float:
        return self.answer_until if isinstance(self.request_sent, Commit) else self.deadline

    @property
    def due_at(self) -> float | None:
        if self.state is FetchState.DRAINING or self.state in ENDS:
            return None
        times = [self.ends_at]
        if self.place is not None:
            times.append(self.place_until)
        if self.request_at is not None:
            times.append(self.request_at)
        if self.held is not None and self.state in LEASED:
            times.append(self.lease_ends_at)
        return min(times)

    def makes_progress(self, now: float) -> bool:
        waits = self.request_at is not None and self.chunk is None
        return self.state in UNDER_WAY and not waits and now < self.place_until

    def next_chunk(self) -> ev.ReadChunk | None:
        """Return the next tokens to read, the state after the seal, or None."""
        request, has_state = self.requested.request, self.requested.has_state
        wanted, chunk_tokens, start = request.num_tokens, request.chunk_tokens, self.read_to
        stop = min(self.num_ready, wanted)
        if chunk_tokens:
            stop = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        does_more = has_state or (request.zero_tail and wanted > request.first_token)
        lacks_last = self.sealed and does_more and not self.last_was_read
        if stop <= start and not lacks_last:
            return None
        last = self.sealed and stop == wanted
        epoch, token = (self.held.epoch, self.held.token) if self.held else (0, "")
        after = self.held.after if self.held else 0
        tables = dict(self.tables)
        return ev.ReadChunk(self.requested, epoch, token, tables, start, stop, last, after)

    def retire(self) -> None:
        self.tables, self.held, self.request_sent = {}, None, None
        requested = self.requested
        self.requested = replace(
            requested,
            request=replace(requested.request, ticket={}, tables={}),
            ticket=replace(requested.ticket, blocks=""),
            reply_to=None,
            resources=None,
            speculative=None,
        )

    def enter(self, state: FetchState, now: float) -> None:
        if self.state in STAGES:
            spent = self.stages_s.get(self.state, 0.0) + now - self.entered_at
            self.stages_s[self.state] = spent
        self.state, self.entered_at = state, now

    def hold(self, sent_at: float, granted: Granted) -> None:
        """Apply a grant; before the seal of its ticket, only the lease. Raises `KVBusError`."""
        before = self.held
        self.receive(sent_at, granted)
        if before is not None and before.epoch != granted.epoch:
            raise _taken_back("lease epoch", before.epoch, granted.epoch)
        if self.is_speculative and not granted.sealed:
            return
        if granted.num_tokens < self.num_ready:
            raise _taken_back("number of tokens", self.num_ready, granted.num_tokens)
        if self.sealed and not granted.sealed:
            raise _taken_back("seal", self.sealed, granted.sealed)
        request = self.requested.request
        wanted = request.num_tokens
        if granted.sealed and request.at_most and granted.num_tokens < wanted:
            wanted = max(request.first_token, granted.num_tokens)
            self.requested = replace(self.requested, request=replace(request, num_tokens=wanted))
        if granted.sealed and granted.num_tokens < wanted:
            message = f"the offer has {granted.num_tokens} tokens, {wanted} were requested"
            raise LocalError(message, num_tokens=granted.num_tokens)
        if granted.sealed and self.requested.has_state and granted.num_tokens > wanted:
            message = f"the state is that of token {granted.num_tokens}, not of token {wanted}"
            raise LocalError(message, num_tokens=granted.num_tokens)
        if self.is_speculative:
            if granted.tables != self.tables:
                raise _other_blocks()
            self.is_speculative = False
        else:
            for group, more in granted.tables.items():
                known = self.tables.get(group)
                self.tables[group] = more if known is None else known.extended(more)
        self.num_ready, self.sealed = granted.num_tokens, granted.sealed

    def receive(self, sent_at: float, granted: Granted) -> None:
        self.held, self.request_sent = granted, None
        self.lease_ends_at = sent_at + granted.lease_s
        self.request_at = sent_at + granted.lease_s / 3

    def end_attempt(self) -> None:
        self.request_sent, self.held, self.refresh_needed = None, None, False
        self.requested = replace(self.requested, has_route=False, speculative=None)
        if self.unconfirmed:
            return
        self.tables = {}
        if self.is_speculative:
            self.is_speculative = self.sealed = False
            self.num_ready = 0
            self.read_again()

    def note_committed(self, answer: CommitAnswer) -> None:
        request = self.requested.request
        self.error = None
        if request.at_most and answer.num_tokens < request.num_tokens:
            wanted = max(request.first_token, answer.num_tokens)
            self.requested = replace(self.requested, request=replace(request, num_tokens=wanted))

    def move_to(self, pool: ev.PoolName | None) -> bool:
        """Continue in a pool; return False without one, or after `MAX_MOVES`.

        An offer is parked once, and its agent may restart.
        """
        here = self.requested.pool
        is_new = pool is not None and (here is None or pool.engine_id != here.engine_id)
        if not is_new or self.num_moves == MAX_MOVES:
            return False
        self.requested = replace(self.requested, pool=pool)
        self.num_moves += 1
        self.read_again()
        return True

    def read_again(self) -> None:
        self.num_read, self.last_was_read, self.unconfirmed = 0, False, False
        self.nixl_agent = ""

    def land(self, ended: ev.ReadEnded) -> None:
        self.num_bytes += ended.num_bytes
        if ended.elsewhere:
            self.remote_parts_read, self.path = False, self.path or ended.path
            return
        chunk, self.chunk, self.path = self.chunk, None, ended.path or self.path
        if chunk is not None and ended.error is None:
            self.num_read += chunk.stop - chunk.start
            self.last_was_read = chunk.last
            self.nixl_agent = ended.nixl_agent or self.nixl_agent

    def report(self, stage: FetchState, undecided: bool = False) -> ev.ReportFetched:
        error, requested = self.error, self.requested
        fetched = Fetched(
            fetch_id=requested.request.fetch_id,
            request_id=requested.ticket.request_id,
            outcome=Outcome(self.ends_as.value),
            stage=stage.value,
            blocks_free=self.state is not FetchState.DRAINING,
            code="" if error is None else error.code.value,
            message="" if error is None else error.message,
            num_bytes=self.num_bytes,
            path=self.path,
            stages_s=StageTimes(**{state.value: spent for state, spent in self.stages_s.items()}),
            num_tokens=requested.request.num_tokens,
            attempts=self.num_failed,
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
