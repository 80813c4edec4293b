"""One offer, the leases on it, and who waits for it by its name.

A lease is not a state of its own: an offer that is open or sealed has a live lease for each of its
readers at most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome, Released
from kvbus.protocol.message import check_right
from kvbus.protocol.peer import (
    Claim,
    CommitQuery,
    Digest,
    Granted,
    Pack,
    PeerWithdraw,
    Release,
    Renew,
    Take,
)
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import OfferEvent
from kvbus.protocol.word import Word, commit_mark
from kvbus.table import Context as AnyContext
from kvbus.table import Story
from kvbus_prefill.offer import events as ev

NO_BLOCKS = BlockTable(b"")


class OfferState(StrEnum):
    """Where an offer is: its blocks belong to the agent from the opening to the release."""

    AWAITED = "awaited"
    """Readers wait for it by its name; the engine has not made it."""

    OPEN = "open"
    """The engine still computes: blocks and tokens are added."""

    SEALED = "sealed"
    """All tokens are there; only now can a reader take it."""

    RELEASED = "released"
    """Over, and said so: no lease is live, the blocks are the engine's again."""


@dataclass(frozen=True, slots=True)
class OfferLimits:
    """Bounds of the table; durations in seconds.

    ``max_lease_s`` caps one grant, ``max_hold_s`` all renewals of one lease together, and all
    leases with which one reader follows itself. A reader that finds another's lease is told to ask
    again when it ends, or in ``busy_retry_s`` if that is sooner.

    Readers wait for an offer by its name for ``max_wait_s``, and until ``engine_grace_s`` after the
    last engine is lost, as it may come back; one that found no offer may ask again after
    ``early_retry_s``. Of names that were used ``max_names`` are known. An offer has at most
    ``max_parts`` leases of parts that are live or done.

    An offer that is published again lives for at least ``reader_return_s``, as a reader that had a
    lease may acquire another one.
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
    """Tokens of one offer that are denied to earlier processes of readers."""


Context = AnyContext[OfferLimits]


@dataclass(slots=True)
class Lease:
    """A reader's right to read; ``held_until`` is the end that no renewal moves.

    ``holder`` is the CURVE key of its reader, ``reader_agent`` and ``reader_boot`` are the process
    that reads, empty where it did not say so. A lease that is over has an ``end``, the code for a
    late reader; it ``is_done`` when the reader has taken the offer, and may take it again. One that
    ``is_part`` is read beside its reader, by another agent of the same engine.
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

    def is_outlived_by(self, event: ev.Asked[Claim] | ev.Asked[Take]) -> bool:
        """Whether it belongs to an earlier process of the agent that asks.

        Agents have names, not proofs of them. But the claim shows the ticket's secret, which could
        end the offer as well: ending one lease of it by a wrong name is no more.
        """
        message = event.message
        is_of_same = bool(self.reader_agent) and self.reader_agent == message.reader_agent
        return (
            is_of_same and self.reader_boot != message.reader_boot and self.holder == event.holder
        )


@dataclass(slots=True)
class OfferEntry:
    """One offer; ``expires_at`` counts only while there is no live lease.

    Until it is made only ``transfer_id`` and ``waiting`` have a meaning: the calls that wait for
    its ticket, with the end of the wait of each. Readers that ask for its seal put its expiry off,
    but not beyond ``hold_ends_at``. ``leases`` are by epoch: those that are live or done, and as
    many others of the last numbers as it has readers; ``epoch`` is the last number. ``ended_by`` is
    how the offer ended, for those who come late. Until its ``word`` is closed, a reader may have
    taken it. ``taken`` are the marks of commits that no lease shows. A commit with a token in
    ``denied`` counts only from the process with that boot id.
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
    asked_s: float | None = None
    num_tokens: int = 0
    tables: dict[str, BlockTable] = field(default_factory=dict)
    opened_at: float = 0.0
    expires_at: float = 0.0
    hold_ends_at: float | None = None
    epoch: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    outcome: Outcome | None = None
    ended_by: ErrorCode = ErrorCode.OFFER_UNKNOWN
    word: Word | None = None
    taken: tuple[int, ...] = ()
    denied: dict[str, str] = field(default_factory=dict, repr=False)
    story: Story = field(default_factory=Story, compare=False)

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
    def live_leases(self) -> list[Lease]:
        """Those that are not over, the oldest first."""
        return [lease for lease in self.leases.values() if lease.end is None]

    @property
    def num_done(self) -> int:
        """How many readers have everything."""
        return sum(lease.is_done and not lease.is_part for lease in self.leases.values())

    @property
    def commits(self) -> tuple[int, ...]:
        """The marks of all commits."""
        tokens = (lease.token for lease in self.leases.values() if lease.is_done)
        return (*self.taken, *(commit_mark(self.secret, token) for token in tokens))

    def has_committed(self, token: str, holder: str) -> bool:
        """Whether a reader has committed the offer with this token."""
        right = token, holder
        if any(one.is_done and (one.token, one.holder) == right for one in self.leases.values()):
            return True
        if self.word is not None and not self.word.is_closed:
            return self.word.is_taken_by(token)
        return bool(self.taken) and commit_mark(self.secret, token) in self.taken

    def deny(self, asked: CommitQuery, max_denied: int) -> None:
        """Grant a commit with this token to no process but the one that asks.

        Raises `LocalError` (``busy``) when too many tokens are denied.
        """
        if len(self.denied) >= max_denied and asked.token not in self.denied:
            message = f"{max_denied} readers of the offer repeat their fetches, which is the limit"
            raise LocalError(message, code=ErrorCode.BUSY)
        self.denied[asked.token] = asked.reader_boot

    def retire(self) -> None:
        """Keep no tables: a late message asks how it ended, and no more."""
        self.tables, self.ticket, self.waiting = {}, None, {}

    def wait_until(self, when: float) -> None:
        self.expires_at = max(self.expires_at, when)

    def tables_with(self, more: Mapping[str, BlockTable]) -> dict[str, BlockTable]:
        known = self.tables
        return known | {
            group: known[group].extended(added) if group in known else added
            for group, added in more.items()
        }

    def check_right(self, event: ev.Asked[Any]) -> None:
        """Raise `LocalError` (``forbidden``) unless the message shows the right to ask.

        That is the ticket's secret for the offer, and the token for the lease, which belongs to the
        key that claimed it: another one that was told its token may have boxes packed and no more.
        A lease that is not known is not looked at: it is stale whatever is shown. An engine may ask
        for its own offers (else ``offer_unknown``).
        """
        match event.message:
            case Claim(secret=secret) | Take(secret=secret) | PeerWithdraw(secret=secret):
                check_right(secret, self.secret)
            case Renew(epoch=epoch, token=token) | Release(epoch=epoch, token=token):
                self.check_token(epoch, token)
                if (lease := self.leases.get(epoch)) is not None:
                    check_right(event.holder, lease.holder)
            case _ if event.engine_id != self.engine_id and not self.is_over:
                raise LocalError("the offer is another engine's", code=ErrorCode.OFFER_UNKNOWN)

    def check_token(self, epoch: int, token: str) -> None:
        """Raise `LocalError` (``forbidden``) when ``token`` is not that of the lease ``epoch``."""
        if (lease := self.leases.get(epoch)) is not None:
            check_right(token, lease.token)

    def check_box(self, asked: Pack | Digest, *, is_state: bool) -> None:
        """Raise `LocalError` or `GeometryError` unless the offer has the box by now.

        That of a group that ``is_state`` is there once the offer is sealed.
        """
        group, stop, table = asked.box.group, asked.box.stop, asked.table
        if is_state and self.state is OfferState.OPEN:
            raise LocalError(
                f"group '{group}' is a state, it is there once the offer is sealed",
                code=ErrorCode.OFFER_OPEN,
            )
        if not is_state and stop > self.num_tokens:
            raise GeometryError(
                f"box ends at token {stop}, the offer has {self.num_tokens} now",
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
        """The lease of ``epoch``, if it is live; raises `LocalError` otherwise.

        It says what became of one of the latest leases, and ``stale`` of those before.
        """
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
        self, event: ev.Asked[Claim] | ev.Asked[Take], token: str, now: float, held_until: float
    ) -> Lease:
        """A lease under a new number, which has no time yet; the first that ended is forgotten."""
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

    def grant(self, lease: Lease, message: Claim | Renew, at: Context) -> Granted:
        """Lengthen a lease; the reply has the blocks that its reader does not know yet."""
        wanted = min(at.now + min(message.lease_s, at.limits.max_lease_s), lease.held_until)
        lease.expires_at = max(lease.expires_at, wanted)
        known_blocks = message.known_blocks if isinstance(message, Renew) else {}
        return Granted(
            epoch=lease.epoch,
            token=lease.token,
            lease_s=max(lease.expires_at - at.now, 1e-6),
            num_tokens=self.num_tokens,
            sealed=self.state is OfferState.SEALED,
            tables={
                group: _after(table, known_blocks.get(group, 0))
                for group, table in self.tables.items()
            },
        )

    def end_lease(
        self, lease: Lease, reason: str, code: ErrorCode = ErrorCode.STALE
    ) -> ev.EndLease:
        """End a live lease: it was given back or taken (ended), expired, or was revoked."""
        lease.end = code
        return ev.EndLease(self.offer_id, lease.epoch, reason, code)

    def release(self, outcome: Outcome, code: ErrorCode) -> ev.Commands:
        """End the offer, its live leases first, so that no one else has its blocks."""
        return [*self.end(outcome, code), self.report()]

    def end(self, outcome: Outcome, code: ErrorCode) -> ev.Commands:
        """As `release`, without a report to its engine."""
        revoked: ev.Commands = [
            self.end_lease(lease, "revoked", code) for lease in self.live_leases
        ]
        self.state, self.outcome, self.ended_by = OfferState.RELEASED, outcome, code
        return revoked

    def report(self) -> ev.ReportReleased:
        """Report to the engine how the offer ended."""
        outcome = self.outcome or Outcome.WITHDRAWN
        commits = self.commits if outcome is Outcome.COMPLETED else ()
        released = Released(self.offer_id, self.request_id, outcome, commits)
        return ev.ReportReleased(self.engine_id, released, self.num_tokens, self.opened_at)

    def published(self, op: str) -> ev.Publish:
        """The event ``op`` with what subscribers may know of this offer."""
        return ev.Publish(op, OfferEvent(self.offer_id, self.num_tokens))


def _after(table: BlockTable, known_blocks: int) -> BlockTable:
    """The part of a table behind the blocks that the reader already knows."""
    skipped = min(known_blocks, len(table))
    return BlockTable(ids=table.ids[4 * skipped :], first_block=table.first_block + skipped)
