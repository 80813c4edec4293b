"""Handoffs: their plans, their outcomes, and the rules that each outcome must keep."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.sim.world import World

if TYPE_CHECKING:
    from kvbus.engine import Offer
    from tests.sim.engine import SimEngine

Content: TypeAlias = npt.NDArray[np.uint8]
PARTS = ("k", "v")
NUM_HEADS, HEAD_DIM, NUM_LAYERS = 2, 2, 2
GRACE_S = 1.0
"""How long after its deadline a fetch may end by a late reply: `COMMIT_GRACE_S`."""
LATE_S = 0.5
"""What messages to an engine, and a busy network, may take on top."""
QUIET_S = 8.0
"""A fetch of a live offer completes when nothing has gone wrong for so long."""
SPARE_S = 1.5
"""A fetch that may be repeated fails this early at most: no further pause fits in."""
PASSING = (
    *(ErrorCode.PEER_LOST, ErrorCode.PEER_UNREACHABLE, ErrorCode.TRANSFER_FAILED),
    *(ErrorCode.STALE, ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT, ErrorCode.BUSY),
)
"""Errors after which a fetch is repeated."""
UNKNOWN = (ErrorCode.OFFER_UNKNOWN, ErrorCode.ENGINE_UNKNOWN)
"""No fetch fails with these while its prefill engine holds the offer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one request will do, in seconds of the world."""

    prefill: int = 0
    decode: int = 0
    num_tokens: int = 8
    first_token: int = 0
    num_pieces: int = 1
    gap_s: float = 0.005
    """Between two pieces of an offer that grows."""
    fetch_after_s: float | None = 0.0
    """After the offer; None for no fetch."""
    is_held: bool = False
    """Whether the decode engine holds it until the fetch, or for as long as it is allowed to."""
    meets: bool = False
    """Whether it is fetched by a rendezvous, perhaps before the offer."""
    timeout_s: float = 20.0
    ttl_s: float = 30.0
    chunk_tokens: int = 0
    priority: int = 0
    withdraw_after_s: float | None = None
    cancel_after_s: float | None = None
    gives_up_offer: bool = False
    park_after_s: float | None = None
    """When its engine requests that it is parked; None for never."""
    transfer_id: str | None = None


@dataclass(eq=False)
class Handoff:
    """One request, and how far both sides are with it."""

    number: int
    plan: Plan
    content: Content = field(repr=False)
    """Axes: layer, part, head, token, dim."""
    stops: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    offer_id: str = ""
    offer: "Offer | None" = field(default=None, repr=False)
    lost_agent: bool = False
    """Whether the agent that had its offer was lost: an earlier commit may be unknown."""
    is_offered: bool = False
    sealed_at: float = math.inf
    offerer: "SimEngine | None" = field(default=None, repr=False)
    """The engine that has offered, until it has its blocks back."""
    released: bool = False
    outcome: Outcome | None = None
    """Of the offer; None when its engine or agent was gone."""
    asked: Any = field(default=None, repr=False)
    """The last request of its decode engine."""
    fetcher: "SimEngine | None" = field(default=None, repr=False)
    repeated: int = 0
    """How often it was requested again, as the decode agent was lost."""
    is_ended: bool = False
    is_freed: bool = False
    ended_as: str = ""
    attempts: int = 0
    code: str = ""
    num_bytes: int = 0
    requested_at: float = 0.0

    @property
    def name(self) -> str:
        return f"h{self.number}"

    @property
    def end(self) -> str:
        """How its fetch ended, and by which code."""
        return f"{self.ended_as} {self.code}".strip()


@dataclass(eq=False)
class Ledger:
    """All handoffs that are not over, and how many ended how.

    ``late_s`` returns how long the decode side of a handoff was frozen since a time, and
    ``quiet_since`` since when nothing goes wrong. ``on_offered`` gets the ticket.
    """

    world: World
    _: KW_ONLY
    late_s: Callable[[Handoff, float], float]
    quiet_since: Callable[[], float]
    history: Callable[[Handoff], str]
    on_offered: Callable[[Handoff, dict[str, Any]], None]
    ends: Counter[str] = field(default_factory=Counter)
    num_started: int = 0
    live: dict[str, Handoff] = field(default_factory=dict)

    def begin(self, plan: Plan) -> Handoff:
        number = self.num_started
        self.num_started += 1
        shape = NUM_LAYERS, len(PARTS), NUM_HEADS, plan.num_tokens, HEAD_DIM
        drawn = self.world.luck.randbytes(int(np.prod(shape)))
        content = np.frombuffer(drawn, np.uint8).reshape(shape)
        each = -(-plan.num_tokens // plan.num_pieces)
        stops = [min(plan.num_tokens, each * (at + 1)) for at in range(plan.num_pieces)]
        handoff = Handoff(number, plan, content, stops=list(dict.fromkeys(stops)))
        self.live[handoff.name] = handoff
        return handoff

    def find(self, name: str) -> Handoff:
        if name not in self.live:
            self.world.fail(f"{name}: a notice came after all of it was over")
        return self.live[name]

    def offered_by(self, engine: "SimEngine") -> list[Handoff]:
        return [one for one in self.live.values() if one.offerer is engine and not one.released]

    def fetched_by(self, engine: "SimEngine") -> list[Handoff]:
        return [one for one in self.live.values() if one.fetcher is engine and not one.is_freed]

    def release(self, handoff: Handoff, outcome: Outcome | None) -> None:
        """The prefill engine has its blocks back."""
        if handoff.released:
            self.fail(handoff, "its offer was released twice")
        handoff.released, handoff.outcome, handoff.offerer = True, outcome, None
        if not (handoff.offer_id or handoff.plan.meets):  # no decode engine has its ticket
            handoff.is_ended = handoff.is_freed = True
        if handoff.ended_as == "completed" and not self._may_be_read(handoff):
            self.fail(handoff, f"completed, but its offer was {outcome}")
        self._close_if_over(handoff)

    def skip(self, handoff: Handoff) -> None:
        """The prefill engine had no room, or no agent."""
        handoff.released = True
        if not handoff.plan.meets:
            handoff.is_ended = handoff.is_freed = True
        self._close_if_over(handoff)

    def skip_fetch(self, handoff: Handoff) -> None:
        """No fetch was planned, or the decode engine had no room, or no agent."""
        handoff.is_ended = True
        self.ends["skipped"] += 1
        self.freed(handoff)

    def end(self, handoff: Handoff, outcome: str, code: str) -> None:
        """The decode engine has the outcome of its fetch."""
        if handoff.is_ended:
            self.fail(handoff, "its fetch ended twice")
        handoff.is_ended, handoff.ended_as, handoff.code = True, outcome, code
        self.ends[handoff.end] += 1
        took_s, allowed_s = self.world.now - handoff.requested_at, handoff.plan.timeout_s + GRACE_S
        is_late = took_s > allowed_s + LATE_S + self.late_s(handoff, handoff.requested_at)
        if is_late and outcome != "lost":  # an engine that leaves waits for its blocks
            self.fail(handoff, f"ended {took_s - allowed_s:.1f} s behind its deadline")
        if outcome == "failed" and code in PASSING:
            self._check_repeated(handoff)
        if outcome == "failed" and code in UNKNOWN and handoff.is_offered and not handoff.released:
            self.fail(handoff, "its offer lives, and the agent does not know it")
        if outcome == "completed" and not self._may_be_read(handoff):
            self.fail(handoff, f"completed, but its offer was {handoff.outcome}")
        if outcome == "completed" and not handoff.is_offered:
            self.fail(handoff, "completed without an offer")

    def _check_repeated(self, handoff: Handoff) -> None:
        """Check that it had its time, and a reason not to get its bytes."""
        now, ends_at = self.world.now, handoff.requested_at + handoff.plan.timeout_s
        if now < ends_at - SPARE_S:
            self.fail(handoff, f"failed {ends_at - now:.1f} s before its deadline, not repeated")
        began_at = max(self.quiet_since(), handoff.sealed_at, handoff.requested_at)
        is_held = not handoff.released or handoff.outcome is Outcome.PARKED
        if is_held and now - began_at > QUIET_S:
            self.fail(handoff, f"failed though nothing went wrong for {now - began_at:.1f} s")

    def freed(self, handoff: Handoff) -> None:
        """The decode engine has its blocks back."""
        handoff.is_freed, handoff.fetcher = True, None
        self._close_if_over(handoff)

    def fail(self, handoff: Handoff, what: str) -> None:
        """Report a violation, with all that the agents know of the handoff."""
        self.world.fail(f"{handoff.name}: {what}\n{handoff.plan}\n{self.history(handoff)}")

    def _may_be_read(self, handoff: Handoff) -> bool:
        return handoff.lost_agent or handoff.outcome in (None, Outcome.COMPLETED, Outcome.PARKED)

    def _close_if_over(self, handoff: Handoff) -> None:
        if handoff.released and handoff.is_ended and handoff.is_freed:
            self.live.pop(handoff.name, None)
