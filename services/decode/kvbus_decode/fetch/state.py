"""The states of a fetch, and the bounds of all of them."""

from dataclasses import dataclass
from enum import StrEnum

from kvbus.table import Context as AnyContext


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
    """The lease is ours and what was ready is read; the prefill engine still computes."""

    READING = "reading"
    """A chunk, all that was ready when it began, is on its way into the blocks."""

    CONFIRMING = "confirming"
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
    FetchState.CONFIRMING,
)
ENDS = (FetchState.COMPLETED, FetchState.FAILED, FetchState.CANCELLED)
UNDER_WAY = (FetchState.CLAIMING, FetchState.READING, FetchState.CONFIRMING)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the table; durations in seconds.

    A fetch whose transfers cannot be stopped counts in ``max_fetches`` until they end. To begin, it
    needs one of ``num_places``, and has it for at most ``patience_s``. A read without a lease asks
    for one when it has taken ``claim_after_s``. What was asked by the deadline may be answered
    ``confirm_grace_s`` after it.
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
    confirm_grace_s: float = 1.0


Context = AnyContext[FetchLimits]
