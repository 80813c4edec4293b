"""One leg: a box of a chunk on its way into the engine's blocks, stage by stage.

    direct       wanted ────────────────────────▶ reading ─────────────▶ over
    reordered    wanted ─▶ packing ─────────────▶ reading ─────────────▶ over
    packed       wanted ─▶ packing ─▶ packed ───▶ reading ─▶ copying ──▶ over
    mapped       wanted ───────────────────────────────────▶ copying ──▶ over
    zeroing      wanted ───────────────────────────────────▶ copying ──▶ over
    delegated    wanted ─▶ delegated ──────────────────────────────────▶ over
    comparing    wanted ─▶ asking ─▶ known ─ all others are over ─▶ comparing ─▶ over

What may write into the engine's blocks is reading (unless into a slot of ours), copying or
delegated. Such a leg is never over before the agent has said that it ended: NIXL, a thread and
another agent cannot be called back. All others are over as soon as they are stopped.

A comparing leg writes nothing. Its holder makes digests while the other legs are under way; ours
are made when all of these are over, zeroing included, of what the read leaves in the blocks.

One READ that feeds several of our ranks is a packed leg whose copy writes to all of them. So its
slot of ours is given on when none of them is copied to any more.

Other ways to move a box are other stages, and need nothing new here. An optimistic read is a direct
leg that is started before the lease is there: a leg knows no lease, the fetch decides what its
bytes are worth.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class LegState(StrEnum):
    """Where a leg is."""

    WANTED = "wanted"
    """Its turn has not come: as many legs of its read are under way as may be."""

    PACKING = "packing"
    """Its holder was asked to gather the box into a slot there."""

    PACKED = "packed"
    """The box lies in a slot there, and the leg waits for a slot here."""

    READING = "reading"
    """A READ is planned or posted."""

    COPYING = "copying"
    """Threads copy into the engine's blocks: out of a slot of ours, mapped memory, or zeros."""

    DELEGATED = "delegated"
    """Another agent of the engine reads for its ranks."""

    ASKING = "asking"
    """Its holder was asked for digests of the box."""

    KNOWN = "known"
    """The digests of its holder are here; other legs are not over."""

    COMPARING = "comparing"
    """Threads make digests of the engine's blocks."""

    OVER = "over"
    """Nothing of it can write anywhere."""


class Stage(StrEnum):
    """What a leg needs done, in this order."""

    PACK = "pack"
    READ = "read"
    COPY = "copy"
    DELEGATE = "delegate"
    COMPARE = "compare"


@dataclass(slots=True, eq=False)
class Leg:
    """One leg; ``work`` is what the agent needs to carry it out, and means nothing here.

    ``source`` is the holder's agent, ``device`` where the slots of ours are that it reads into.
    ``slot_id`` names the slot there while it is the leg's, ``slot`` is the number of ours.
    """

    stages: tuple[Stage, ...]
    work: Any
    source: Hashable = None
    device: Hashable = None
    number: int = 0
    state: LegState = LegState.WANTED
    asked_at: float = 0.0
    slot_id: int | None = None
    slot_expires_at: float | None = None
    slot: int | None = None

    @property
    def needs_slot(self) -> bool:
        """Whether it is read into a slot of ours."""
        return Stage.READ in self.stages and Stage.COPY in self.stages

    @property
    def only_compares(self) -> bool:
        """Whether it brings no bytes: those of its read have landed when all others are over."""
        return self.state in (LegState.ASKING, LegState.KNOWN, LegState.COMPARING)
