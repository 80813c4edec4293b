"""State of one offer and its leases."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import NO_BLOCKS, BlockTable
from kvbus.protocol.commit_cell import CommitCell, commit_mark
from kvbus.protocol.engine import NUM_SEQUENCE_WORDS, Outcome, Park, Released
from kvbus.protocol.message import check_right
from kvbus.protocol.peer import (
    Acquire,
    Commit,
    CommitQuery,
    Digest,
    Granted,
    Pack,
    PeerWithdraw,
    Release,
    Renew,
)
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import OfferEvent
from kvbus.table.table import Context as AnyContext
from kvbus.table.table import History
from kvbus_prefill.offer import events as ev


class OfferState(StrEnum):
    """State of an offer. Its blocks belong to the agent until it is released."""

    AWAITED = "awaited"
    """Readers wait for it by name; the engine has not made it."""

    OPEN = "open"
    """The engine adds blocks and tokens."""

    SEALED = "sealed"
    """All tokens are there; only now can a reader commit it."""

    PARKED = "parked"
    """Readers get a copy in a pool of the agent. The blocks belong to the engine."""

    RELEASED = "released"
    """No lease is live, and the blocks belong to the engine."""


@dataclass(frozen=True, slots=True)
class OfferLimits:
    """Bounds of the table.

    Without an engine, readers wait for ``engine_grace_s``. A republished offer lives for at least
    ``reader_return_s``, so that its reader can acquire a new lease.
    """

    max_offers: int = 4096
    max_retired_bytes: int = 32 << 20
    max_lease_s: float = 30.0
    max_hold_s: float = 600.0
    busy_retry_s: float = 0.25
    max_wait_s: float = 30.0
    engine_grace_s: float = 2.0
    early_retry_s: float = 0.001
    reader_return_s: float = 10.0
    max_names: int = 16_384
    max_parts: int = 1024
    max_denied: int = 1024


Context = AnyContext[OfferLimits]


@dataclass(slots=True)
class Lease:
    """Right of a reader to read; no renewal moves ``held_until``.

    A late reader gets the code ``end``. A lease that ``is_part`` is for another agent of the
    reader's engine.
    """

    epoch: int
    reader_id: str
    token: str = field(repr=False)
    holder: str
    reader_agent: str
    reader_boot: str
    is_part: bool
    expires_at: float
    held_until: float
    end: ErrorCode | None = None
    is_done: bool = False

    def is_outlived_by(
        self, event: ev.RequestReceived[Acquire] | ev.RequestReceived[Commit]
    ) -> bool:
        """Return whether the request is from a later process of the reader.

        Agent names are not authenticated. But the sender of a false name has the ticket's secret,
        and could end the offer anyway.
        """
        message = event.message
        is_same_agent = bool(self.reader_agent) and self.reader_agent == message.reader_agent
        return (
            is_same_agent
            and self.reader_boot != message.reader_boot
            and self.holder == event.holder
        )


@dataclass(slots=True)
class OfferEntry:
    """State of one offer; ``expires_at`` counts only without a live lease.

    An awaited offer has only ``transfer_id`` and ``waiting``, the end of each wait. A parked one
    has ``pooled`` blocks, whose tables are its ``tables``, and no cell. ``leases`` are
    live and done ones, and the last ``readers`` others. ``denied`` maps tokens to the only boot id
    that may commit with them.
    """

    offer_id: str
    transfer_id: str = field(default="", repr=False)
    state: OfferState = OfferState.AWAITED
    waiting: dict[object, float] = field(default_factory=dict)
    engine_id: str = ""
    request_id: str = ""
    secret: str = field(default="", repr=False)
    ticket: Ticket | None = None
    ttl_s: float = 0.0
    readers: int = 1
    traceparent: str = ""
    sent_s: float | None = None
    num_tokens: int = 0
    after: int = 0
    tables: dict[str, BlockTable] = field(default_factory=dict)
    opened_at: float = 0.0
    sealed_at: float = 0.0
    park: Park = Park.WHEN_FULL
    pooled: ev.Pooled | None = None
    expires_at: float = 0.0
    hold_ends_at: float | None = None
    epoch: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    outcome: Outcome | None = None
    ended_by: ErrorCode = ErrorCode.OFFER_UNKNOWN
    cell: CommitCell | None = None
    committed: tuple[int, ...] = ()
    denied: dict[str, str] = field(default_factory=dict, repr=False)
    history: History = field(default_factory=History, compare=False)

    @property
    def key(self) -> str:
        return self.offer_id

    @property
    def is_over(self) -> bool:
        return self.state is OfferState.RELEASED

    @property
    def due_at(self) -> float | None:
        if self.state is OfferState.AWAITED:
            return min(self.waiting.values(), default=None)
        return min((lease.expires_at for lease in self.live_leases), default=self.expires_at)

    @property
    def memory_engine_id(self) -> str:
        """Engine whose memory has the blocks: a pool, if the offer is parked."""
        return self.engine_id if self.pooled is None else self.pooled.engine_id

    @property
    def may_be_parked(self) -> bool:
        is_used = any(one.end is None or one.is_done for one in self.leases.values())
        return self.state is OfferState.SEALED and self.park is not Park.NEVER and not is_used

    @property
    def live_leases(self) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.end is None]

    @property
    def num_done(self) -> int:
        return sum(lease.is_done and not lease.is_part for lease in self.leases.values())

    @property
    def commits(self) -> tuple[int, ...]:
        tokens = (lease.token for lease in self.leases.values() if lease.is_done)
        return (*self.committed, *(commit_mark(self.secret, token) for token in tokens))

    def has_committed(self, token: str, holder: str) -> bool:
        right = token, holder
        if any(one.is_done and (one.token, one.holder) == right for one in self.leases.values()):
            return True
        if self.cell is not None and not self.cell.is_closed:
            return self.cell.is_committed_by(token)
        return bool(self.committed) and commit_mark(self.secret, token) in self.committed

    def deny(self, request: CommitQuery, max_denied: int) -> None:
        """Deny commits with this token, except from the requesting process."""
        if len(self.denied) >= max_denied and request.token not in self.denied:
            message = f"{max_denied} readers of the offer repeat their fetches, which is the limit"
            raise LocalError(message, code=ErrorCode.BUSY)
        self.denied[request.token] = request.reader_boot

    def retire(self) -> None:
        self.tables, self.ticket, self.waiting, self.pooled = {}, None, {}, None

    @property
    def is_held(self) -> bool:
        return self.hold_ends_at is not None

    def hold(self, seconds: float, at: Context) -> bool:
        """Keep the offer, for ``max_hold_s`` after the first call; return whether it is kept."""
        if self.hold_ends_at is None:
            self.hold_ends_at = at.now + at.limits.max_hold_s
        self.wait_until(min(at.now + seconds, self.hold_ends_at))
        return at.now < self.hold_ends_at

    def wait_until(self, when: float) -> None:
        self.expires_at = max(self.expires_at, when)

    def note_work(self, after: int) -> None:
        """Keep the number of the last GPU work. Raises `LocalError` for one of another stream."""
        if after and self.after and (after - self.after) % NUM_SEQUENCE_WORDS:
            raise LocalError(
                f"'after' is {after}, but was {self.after}: the numbers of one offer are of one "
                f"stream, so equal modulo {NUM_SEQUENCE_WORDS}"
            )
        self.after = max(self.after, after)

    def tables_with(self, more: Mapping[str, BlockTable]) -> dict[str, BlockTable]:
        known = self.tables
        return known | {
            group: known[group].extended(added) if group in known else added
            for group, added in more.items()
        }

    def check_right(self, event: ev.RequestReceived[Any]) -> None:
        """Raise `LocalError` without the right to a request.

        An unknown lease passes, and is stale later.
        """
        match event.message:
            case Acquire(secret=secret) | Commit(secret=secret) | PeerWithdraw(secret=secret):
                check_right(secret, self.secret)
            case Renew(epoch=epoch, token=token) | Release(epoch=epoch, token=token):
                self.check_token(epoch, token)
                if (lease := self.leases.get(epoch)) is not None:
                    check_right(event.holder, lease.holder)
            case _ if event.engine_id != self.engine_id and not self.is_over:
                raise LocalError("the offer is another engine's", code=ErrorCode.OFFER_UNKNOWN)

    def check_token(self, epoch: int, token: str) -> None:
        if (lease := self.leases.get(epoch)) is not None:
            check_right(token, lease.token)

    def check_engine(self, engine_id: str) -> None:
        """Raise `LocalError` (``offer_parked``) unless a parked offer is read from its pool."""
        if self.pooled is not None and engine_id != self.pooled.engine_id:
            raise LocalError(
                "the offer is parked: read it from the pool",
                code=ErrorCode.OFFER_PARKED,
                engine_id=self.pooled.engine_id,
                engine_instance=self.pooled.engine_instance,
            )

    def check_tile(self, request: Pack | Digest, *, is_state: bool) -> None:
        group, stop, table = request.tile.group, request.tile.stop, request.table
        if is_state and self.state is OfferState.OPEN:
            raise LocalError(
                f"group '{group}' is a state, it is there once the offer is sealed",
                code=ErrorCode.OFFER_OPEN,
            )
        if not is_state and stop > self.num_tokens:
            raise GeometryError(
                f"tile ends at token {stop}, the offer has {self.num_tokens} now",
                stop=stop,
                num_tokens=self.num_tokens,
            )
        known = self.tables.get(group, NO_BLOCKS)
        skipped = table.first_block - known.first_block
        if skipped < 0 or known.ids[4 * skipped : 4 * skipped + len(table.ids)] != table.ids:
            raise GeometryError(
                f"blocks {table.first_block} to {table.first_block + len(table)} of group "
                f"'{group}' are not those of the offer",
                offer_id=self.offer_id,
                group=group,
            )

    def live_lease(self, epoch: int) -> Lease:
        """Return a live lease. Raises `LocalError` with the end of a recent one, or ``stale``."""
        lease = self.leases.get(epoch)
        if lease is None or lease.end is not None:
            raise LocalError(
                f"lease epoch {epoch} is not live",
                code=ErrorCode.STALE if lease is None else lease.end,
                offer_id=self.offer_id,
                epoch=epoch,
                current_epoch=self.epoch,
                state=self.outcome or self.state,
            )
        return lease

    def add_lease(
        self,
        event: ev.RequestReceived[Acquire] | ev.RequestReceived[Commit],
        token: str,
        now: float,
        held_until: float,
    ) -> Lease:
        """Add a lease without time, and remove old ones that have ended."""
        message = event.message
        self.epoch += 1
        forgotten = self.epoch - self.readers
        self.leases = {
            epoch: one
            for epoch, one in self.leases.items()
            if one.end is None or one.is_done or epoch > forgotten
        }
        lease = self.leases[self.epoch] = Lease(
            epoch=self.epoch,
            reader_id=message.reader_id,
            token=token,
            holder=event.holder,
            reader_agent=message.reader_agent,
            reader_boot=message.reader_boot,
            is_part=message.part,
            expires_at=now,
            held_until=held_until,
        )
        return lease

    def grant(self, lease: Lease, message: Acquire | Renew, at: Context) -> Granted:
        """Extend a lease; the reply has the blocks that are new to its reader."""
        wanted = min(at.now + min(message.lease_s, at.limits.max_lease_s), lease.held_until)
        lease.expires_at = max(lease.expires_at, wanted)
        known_blocks = message.known_blocks if isinstance(message, Renew) else {}
        return Granted(
            epoch=lease.epoch,
            token=lease.token,
            lease_s=max(lease.expires_at - at.now, 1e-6),
            num_tokens=self.num_tokens,
            sealed=self.state is not OfferState.OPEN,
            tables={
                group: _after(table, known_blocks.get(group, 0))
                for group, table in self.tables.items()
            },
            after=self.after,
        )

    def end_lease(
        self, lease: Lease, reason: str, code: ErrorCode = ErrorCode.STALE
    ) -> ev.EndLease:
        """End a live lease: ``reason`` is ended (released or committed), expired or revoked."""
        lease.end = code
        return ev.EndLease(self.offer_id, lease.epoch, reason, code)

    def release(self, outcome: Outcome, code: ErrorCode) -> ev.Commands:
        """End the leases, then the offer, so that no reader still has its blocks."""
        return [*self.end(outcome, code), self.report()]

    def end(self, outcome: Outcome, code: ErrorCode) -> ev.Commands:
        ends: ev.Commands = [self.end_lease(lease, "revoked", code) for lease in self.live_leases]
        self.state, self.outcome, self.ended_by = OfferState.RELEASED, outcome, code
        return ends if self.pooled is None else [*ends, ev.FreePooled(self.pooled)]

    def report(self) -> ev.ReportReleased:
        outcome = self.outcome or Outcome.WITHDRAWN
        commits = self.commits if outcome is Outcome.COMPLETED else ()
        released = Released(self.offer_id, self.request_id, outcome, commits)
        was_parked = self.pooled is not None
        return ev.ReportReleased(
            self.engine_id, released, self.num_tokens, self.opened_at, was_parked
        )

    def report_parked(self, pooled: ev.Pooled) -> ev.ReportParked:
        released = Released(self.offer_id, self.request_id, Outcome.PARKED)
        return ev.ReportParked(self.engine_id, released, pooled, self.sealed_at)

    def published(self, op: str) -> ev.Publish:
        return ev.Publish(op, OfferEvent(self.offer_id, self.num_tokens))


def _after(table: BlockTable, known_blocks: int) -> BlockTable:
    skipped = min(known_blocks, len(table))
    return BlockTable(ids=table.ids[4 * skipped :], first_block=table.first_block + skipped)
