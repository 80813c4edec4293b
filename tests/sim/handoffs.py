"""What is handed off, what became of it, and what must be true of that."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
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
"""How long behind its deadline a fetch may end by the last word on it: `COMMIT_GRACE_S`."""
LATE_S = 0.5
"""What messages to an engine, and a busy network, may take on top."""
QUIET_S = 8.0
"""When nothing has gone wrong for so long, a fetch of an offer that lives completes."""
SPARE_S = 1.5
"""A fetch that may be repeated fails this early at most: then no pause fits in any more."""
PASSING = frozenset(
    (
        *(ErrorCode.PEER_LOST, ErrorCode.PEER_UNREACHABLE, ErrorCode.TRANSFER_FAILED),
        *(ErrorCode.STALE, ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT, ErrorCode.BUSY),
    )
)
"""What a fetch is repeated after."""
UNKNOWN = (ErrorCode.OFFER_UNKNOWN, ErrorCode.ENGINE_UNKNOWN)
"""What no fetch is told while its prefill engine holds the offer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one request will do. Seconds are those of the world."""

    prefill: int = 0
    decode: int = 0
    num_tokens: int = 8
    first_token: int = 0
    num_pieces: int = 1
    gap_s: float = 0.005
    """Between two pieces of an offer that grows."""
    fetch_after_s: float | None = 0.0
    """Behind the offer; None: nobody fetches it."""
    meets: bool = False
    """Whether it is fetched by a rendezvous, when the offer may not have been made."""
    timeout_s: float = 20.0
    ttl_s: float = 30.0
    chunk_tokens: int = 0
    priority: int = 0
    withdraw_after_s: float | None = None
    cancel_after_s: float | None = None
    gives_up_offer: bool = False
    transfer_id: str | None = None


@dataclass(eq=False)
class Handoff:
    """One request: its plan, its KV, and where both sides are."""

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
    """Whether the agent that had its offer was lost: a commit before that may be unknown."""
    is_offered: bool = False
    sealed_at: float = math.inf
    offerer: "SimEngine | None" = field(default=None, repr=False)
    """The engine that has asked its agent, until it has its blocks back."""
    released: bool = False
    outcome: Outcome | None = None
    """Of the offer; None when its engine or agent was gone."""
    asked: Any = field(default=None, repr=False)
    """The last request for it, of its decode engine."""
    fetcher: "SimEngine | None" = field(default=None, repr=False)
    """As ``offerer``."""
    repeated: int = 0
    """How often it was asked for again, as the decode agent was lost."""
    is_ended: bool = False
    is_freed: bool = False
    """Whether the decode engine has its blocks back."""
    ended_as: str = ""
    attempts: int = 0
    code: str = ""
    num_bytes: int = 0
    """Of what was read, as the decode engine was told."""
    asked_at: float = 0.0

    @property
    def name(self) -> str:
        return f"h{self.number}"

    @property
    def end(self) -> str:
        """How its fetch ended, and by which code."""
        return f"{self.ended_as} {self.code}".strip()


class Ledger:
    """All handoffs that are not over; counts how they ended.

    ``late_s`` says how long the decode side of a handoff was frozen since a time, ``quiet_since``
    since when nothing goes wrong, ``history`` what the agents know of a handoff. ``on_offered``
    gets its ticket.
    """

    def __init__(
        self,
        world: World,
        *,
        late_s: Callable[[Handoff, float], float],
        quiet_since: Callable[[], float],
        history: Callable[[Handoff], str],
        on_offered: Callable[[Handoff, dict[str, Any]], None],
    ) -> None:
        self.world = world
        self.ends: Counter[str] = Counter()
        self.num_started = 0
        self.live: dict[str, Handoff] = {}
        self.on_offered = on_offered
        self._late_s, self._quiet_since, self._history = late_s, quiet_since, history

    def begin(self, plan: Plan) -> Handoff:
        number = self.num_started
        self.num_started += 1
        shape = NUM_LAYERS, len(PARTS), NUM_HEADS, plan.num_tokens, HEAD_DIM
        drawn = self.world.luck.bytes(int(np.prod(shape)))
        content = np.frombuffer(drawn, np.uint8).reshape(shape)
        each = -(-plan.num_tokens // plan.num_pieces)
        stops = [min(plan.num_tokens, each * (at + 1)) for at in range(plan.num_pieces)]
        handoff = Handoff(number, plan, content, stops=list(dict.fromkeys(stops)))
        self.live[handoff.name] = handoff
        return handoff

    def find(self, name: str) -> Handoff:
        handoff = self.live.get(name)
        if handoff is None:
            self.world.fail(f"{name}: a notice came after all of it was over")
            raise AssertionError
        return handoff

    def offered_by(self, engine: "SimEngine") -> list[Handoff]:
        """What was not released."""
        return [one for one in self.live.values() if one.offerer is engine and not one.released]

    def fetched_by(self, engine: "SimEngine") -> list[Handoff]:
        """What has not ended, or holds blocks."""
        return [one for one in self.live.values() if one.fetcher is engine and not one.is_freed]

    def release(self, handoff: Handoff, outcome: Outcome | None) -> None:
        """The prefill engine has its blocks back."""
        if handoff.released:
            self.fail(handoff, "its offer was released twice")
        handoff.released, handoff.outcome, handoff.offerer = True, outcome, None
        if not (handoff.offer_id or handoff.plan.meets):  # nobody has heard of it
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
        """Nobody fetches it, or the decode engine had no room, or no agent."""
        handoff.is_ended = True
        self.ends["skipped"] += 1
        self.freed(handoff)

    def end(self, handoff: Handoff, outcome: str, code: str) -> None:
        """The decode engine was told how it ended."""
        if handoff.is_ended:
            self.fail(handoff, "its fetch ended twice")
        handoff.is_ended, handoff.ended_as, handoff.code = True, outcome, code
        self.ends[handoff.end] += 1
        took_s, allowed_s = self.world.now - handoff.asked_at, handoff.plan.timeout_s + GRACE_S
        is_late = took_s > allowed_s + LATE_S + self._late_s(handoff, handoff.asked_at)
        if is_late and outcome != "lost":  # who leaves waits until its blocks are its own
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
        """It had its time, and something kept it from its bytes."""
        now, ends_at = self.world.now, handoff.asked_at + handoff.plan.timeout_s
        if now < ends_at - SPARE_S:
            self.fail(handoff, f"failed {ends_at - now:.1f} s before its deadline, not repeated")
        began_at = max(self._quiet_since(), handoff.sealed_at, handoff.asked_at)
        if not handoff.released and now - began_at > QUIET_S:
            self.fail(handoff, f"failed though nothing went wrong for {now - began_at:.1f} s")

    def freed(self, handoff: Handoff) -> None:
        """The decode engine has its blocks back."""
        handoff.is_freed, handoff.fetcher = True, None
        self._close_if_over(handoff)

    def fail(self, handoff: Handoff, what: str) -> None:
        """Something that must not be, with what the agents know of the handoff."""
        self.world.fail(f"{handoff.name}: {what}\n{handoff.plan}\n{self._history(handoff)}")

    def _may_be_read(self, handoff: Handoff) -> bool:
        return handoff.lost_agent or handoff.outcome in (None, Outcome.COMPLETED)

    def _close_if_over(self, handoff: Handoff) -> None:
        if handoff.released and handoff.is_ended and handoff.is_freed:
            self.live.pop(handoff.name, None)
