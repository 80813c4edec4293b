"""One fetch: what was asked for, how far it is, and how it ends.

Refuses to decide which event may do what; that is the table in `kvbus_decode.transitions`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome, StageTimes
from kvbus.protocol.peer import Granted
from kvbus_decode import fetch_events as ev


class FetchState(StrEnum):
    """Where a fetch is. The last three are ends; draining is one as well, but for its blocks."""

    RESOLVING = "resolving"
    """The prefill agent is being connected to, and asked whether its engine fits ours."""

    CLAIMING = "claiming"
    """The lease was asked for, or is asked for again because another reader has it."""

    WAITING = "waiting"
    """The lease is ours, the prefill engine still computes."""

    READING = "reading"
    """Bytes are on their way into the blocks."""

    CONFIRMING = "confirming"
    """All bytes have landed; only the prefill agent knows whether the lease was live."""

    DRAINING = "draining"
    """The fetch has ended and said so, but bytes can still land: its blocks are not free."""

    COMPLETED = "completed"
    """The KV is valid."""

    FAILED = "failed"
    """There is no KV, and nothing in flight."""

    CANCELLED = "cancelled"
    """The engine did not want the KV any more; nothing is in flight."""


STAGES = (
    FetchState.RESOLVING,
    FetchState.CLAIMING,
    FetchState.WAITING,
    FetchState.READING,
    FetchState.CONFIRMING,
)
ENDS = (FetchState.COMPLETED, FetchState.FAILED, FetchState.CANCELLED)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the table; durations in seconds.

    A fetch whose transfers cannot be stopped keeps its place in ``max_fetches`` until they end.
    """

    max_fetches: int = 4096
    max_tombstones: int = 4096
    lease_s: float = 10.0
    request_timeout_s: float = 5.0
    busy_retry_s: float = 0.05


@dataclass(slots=True)
class Held:
    """The lease as this side sees it: it ends no later here than at the prefill agent."""

    epoch: int
    expires_at: float
    renew_at: float
    renewing: bool = False


@dataclass(slots=True)
class Fetch:
    """One fetch; ``deadline`` is absolute.

    ``read_in_flight`` is True from StartRead to ReadEnded; ``hinted`` when news came in while a
    claim or renewal was under way, whose reply may be older than the news.
    """

    requested: ev.Requested
    deadline: float
    state: FetchState = FetchState.RESOLVING
    entered_at: float = 0.0
    stages_s: dict[FetchState, float] = field(default_factory=dict)
    held: Held | None = None
    claim_again_at: float | None = None
    tables: dict[str, BlockTable] = field(default_factory=dict)
    read_in_flight: bool = False
    hinted: bool = False
    num_bytes: int = 0
    ends_as: FetchState = FetchState.FAILED
    error: KVBusError | None = None

    @property
    def fetch_id(self) -> str:
        """The engine's own name of the fetch."""
        return self.requested.fetch_id

    @property
    def num_tokens_to_read(self) -> int:
        """Tokens that the engine does not have yet."""
        return self.requested.num_tokens - self.requested.first_token

    def next_deadline(self) -> float | None:
        """When somebody must look at this fetch again; None while only transfers can end it."""
        if self.state is FetchState.DRAINING or self.state in ENDS:
            return None
        times = [self.deadline]
        if self.claim_again_at is not None:
            times.append(self.claim_again_at)
        if self.held is not None and self.state is not FetchState.CONFIRMING:
            times.append(self.held.expires_at)
            if not self.held.renewing:
                times.append(self.held.renew_at)
        return min(times)

    def enter(self, state: FetchState, now: float) -> None:
        """Move to ``state`` and account the time in the one before."""
        if self.state in STAGES:
            spent = self.stages_s.get(self.state, 0.0) + now - self.entered_at
            self.stages_s[self.state] = spent
        self.state, self.entered_at = state, now

    def hold(self, sent_at: float, granted: Granted) -> None:
        """Take over what a claim or a renewal granted."""
        expires_at = sent_at + granted.lease_s
        self.held = Held(granted.epoch, expires_at, sent_at + granted.lease_s / 3)
        for group, more in granted.tables.items():
            known = self.tables.get(group)
            self.tables[group] = more if known is None else known.extended(more)

    def report(self, outcome: Outcome, stage: FetchState, *, blocks_free: bool) -> ev.ReportFetched:
        """The one message that tells the engine how the fetch ended."""
        return ev.ReportFetched(
            fetch_id=self.fetch_id,
            engine_id=self.requested.engine_id,
            request_id=self.requested.ticket.request_id,
            outcome=outcome,
            stage=stage.value,
            blocks_free=blocks_free,
            num_bytes=self.num_bytes,
            stages_s=StageTimes(**{state.value: spent for state, spent in self.stages_s.items()}),
            error=self.error,
        )
