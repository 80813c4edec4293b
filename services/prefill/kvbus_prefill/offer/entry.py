"""One offer and the leases on it: what it holds, and how either ends.

A lease is not a state of its own: an offer that is open or sealed has a live lease for each of its
readers at most.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome
from kvbus.protocol.events import LeaseEvent, OfferEvent
from kvbus.protocol.rights import check_right
from kvbus.table import Context as AnyContext
from kvbus.table import Story
from kvbus_prefill.offer import events as ev


class OfferState(StrEnum):
    """Where an offer is: its blocks belong to the agent until it is released."""

    OPEN = "open"
    """The engine still computes: blocks and tokens are added."""

    SEALED = "sealed"
    """All tokens are there; only now can a reader confirm."""

    RELEASED = "released"
    """Over, and said so: no lease is live, the blocks are the engine's again."""


@dataclass(frozen=True, slots=True)
class OfferLimits:
    """Bounds of the table; durations in seconds.

    ``max_lease_s`` caps one grant, ``max_hold_s`` all renewals of one lease together, and all
    leases with which one reader follows itself. Who finds another's lease is told to come again
    when it ends, or in ``busy_retry_s`` if that is sooner.
    """

    max_offers: int = 4096
    max_retired: int = 65_536
    max_retired_bytes: int = 32 << 20
    max_lease_s: float = 30.0
    max_hold_s: float = 600.0
    busy_retry_s: float = 0.25


Context = AnyContext[OfferLimits]


@dataclass(frozen=True, slots=True)
class OfferedBox:
    """Positions up to ``stop`` of the blocks of ``table``, as a reader wants them gathered.

    ``opaque`` says that they are a state, which is there once the offer is sealed. ``epoch`` and
    ``token`` are those of the reader's lease; without one it shows the ticket's ``secret``.
    """

    offer_id: str
    epoch: int
    token: str = field(repr=False)
    group: str
    table: BlockTable
    stop: int
    opaque: bool
    secret: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class Lease:
    """A reader's right to read; ``held_until`` is the end that no renewal moves.

    ``holder`` is the key of its reader. One that is over has an ``end``, what a late reader is
    told, and ``is_done`` when its reader has everything: then it may say so again.
    """

    epoch: int
    reader_id: str
    expires_at: float
    held_until: float
    process: ev.ReaderProcess = ev.NAMELESS
    token: str = field(default="", repr=False)
    holder: str = ""
    end: ErrorCode | None = None
    is_done: bool = False


@dataclass(slots=True)
class OfferEntry:
    """One offer; ``expires_at`` counts only while there is no live lease.

    Readers that wait for its seal without one put it off, but not beyond ``hold_ends_at``.
    ``leases`` are by epoch: those that are live or done, and as many others of the last numbers as
    it has readers. ``epoch`` is the last number, ``num_done`` how many readers have everything;
    ``ended_by`` is how the offer ended.
    """

    opened: ev.Opened
    state: OfferState
    num_tokens: int
    tables: dict[str, BlockTable]
    expires_at: float
    hold_ends_at: float | None = None
    opened_at: float = 0.0
    epoch: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    num_done: int = 0
    outcome: Outcome | None = None
    ended_by: ErrorCode = ErrorCode.OFFER_UNKNOWN
    story: Story = field(default_factory=Story, compare=False)

    @property
    def key(self) -> str:
        """Names the offer in the table."""
        return self.opened.offer_id

    @property
    def is_over(self) -> bool:
        """Whether its blocks are the engine's again."""
        return self.state is OfferState.RELEASED

    @property
    def offer_id(self) -> str:
        """The id that tickets carry."""
        return self.opened.offer_id

    @property
    def due_at(self) -> float:
        """When somebody must look at this offer again."""
        ends = [lease.expires_at for lease in self.live_leases]
        return min(ends) if ends else self.expires_at

    @property
    def live_leases(self) -> list[Lease]:
        """Those that are not over, the oldest first."""
        return [lease for lease in self.leases.values() if lease.end is None]

    def wait_until(self, when: float) -> None:
        """Do not expire before ``when``."""
        self.expires_at = max(self.expires_at, when)

    def retire(self) -> None:
        """Keep no tables, and not the request that is answered."""
        self.opened = replace(self.opened, tables={}, ticket={}, reply_to=None)

    # Who asks must hold the right: the ticket's secret for the offer, the token for the lease. What
    # is said of a lease that is not kept is stale whatever it shows.
    def check_right(self, event: ev.RequestEvent) -> None:
        """Raise `LocalError` (``forbidden``) when what ``event`` shows is not the right to ask."""
        match event:
            case (
                ev.Claimed(secret=secret)
                | ev.Taken(secret=secret)
                | ev.Withdrawn(secret=str(secret))
            ):
                check_right(secret, self.opened.secret)
            case ev.Renewed() | ev.Confirmed() | ev.Returned():
                self.check_token(event.epoch, event.token)
                self._check_holder(event.epoch, event.holder)

    def check_token(self, epoch: int, token: str) -> None:
        """Raise `LocalError` (``forbidden``) when ``token`` is not that of the lease ``epoch``."""
        if (lease := self.leases.get(epoch)) is not None:
            check_right(token, lease.token)

    def _check_holder(self, epoch: int, holder: str) -> None:
        """A lease is of the key that claimed it: whoever is told its token may pack and no more."""
        if (lease := self.leases.get(epoch)) is not None:
            check_right(holder, lease.holder)

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

    def add_lease(self, lease: Lease) -> None:
        """A lease under a new number; who gave up long ago is forgotten, who is done never."""
        self.epoch = lease.epoch
        forgotten = lease.epoch - self.opened.readers
        self.leases = {
            epoch: one
            for epoch, one in self.leases.items()
            if one.end is None or one.is_done or epoch > forgotten
        }
        self.leases[lease.epoch] = lease

    def check_box(self, box: OfferedBox) -> None:
        """Raise `LocalError` or `GeometryError` unless the offer has ``box`` by now."""
        if box.opaque and self.state is OfferState.OPEN:
            raise LocalError(
                f"group '{box.group}' is a state, it is there once the offer is sealed",
                code=ErrorCode.OFFER_OPEN,
            )
        if not box.opaque and box.stop > self.num_tokens:
            raise GeometryError(
                f"box ends at token {box.stop}, the offer has {self.num_tokens} now",
                stop=box.stop,
                num_tokens=self.num_tokens,
            )
        table, known = box.table, self.tables.get(box.group, BlockTable(b""))
        skipped = table.first_block - known.first_block
        if skipped < 0 or known.ids[4 * skipped : 4 * skipped + len(table.ids)] != table.ids:
            raise GeometryError(
                f"blocks {table.first_block} to {table.first_block + len(table)} of group "
                f"'{box.group}' are not those of the offer",
                offer_id=self.offer_id,
                group=box.group,
            )

    def end_lease(
        self, lease: Lease, reason: str, code: ErrorCode = ErrorCode.STALE
    ) -> list[ev.Command]:
        """End a live lease, because it was confirmed, returned, revoked or late."""
        lease.end = code
        return [
            ev.EndLease(self.offer_id, lease.epoch, reason, code),
            ev.Publish(f"lease.{reason}", LeaseEvent(offer_id=self.offer_id, epoch=lease.epoch)),
        ]

    def count_reader(self) -> list[ev.Command]:
        """One more reader has everything; with the last one the offer is done."""
        self.num_done += 1
        if self.num_done < self.opened.readers:
            return []
        return self.release(Outcome.COMPLETED, ErrorCode.OFFER_COMPLETED)

    def release(self, outcome: Outcome, code: ErrorCode) -> list[ev.Command]:
        """End the offer, its live leases first, so that its blocks are nobody else's."""
        commands: list[ev.Command] = []
        for lease in self.live_leases:
            commands += self.end_lease(lease, "revoked", code)
        self.state, self.outcome, self.tables = OfferState.RELEASED, outcome, {}
        self.ended_by = code
        opened = self.opened
        report = ev.ReportReleased(
            opened.engine_id,
            opened.offer_id,
            opened.request_id,
            outcome,
            self.num_tokens,
            self.opened_at,
        )
        return [*commands, report, self.published("offer.released")]

    def published(self, op: str) -> ev.Publish:
        """The event ``op`` with what subscribers may know of this offer."""
        outcome = "" if self.outcome is None else str(self.outcome)
        return ev.Publish(
            op, OfferEvent(offer_id=self.offer_id, num_tokens=self.num_tokens, outcome=outcome)
        )
