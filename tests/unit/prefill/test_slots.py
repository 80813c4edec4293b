"""The slot table: whose tile is gathered next, into which slot, and when a slot is free again.

Each case is a script: events, with the time when it passes, and what is done; see `done`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from kvbus.errors import ErrorCode, SegmentError
from kvbus.geometry import BlockTable, KvPart, Tile
from kvbus.protocol import Pack, Packed
from kvbus.table.events import DeadlinePassed, EngineLost, Refuse, SendReply, Stopped
from kvbus_prefill import slot_table as slots

LIMITS = slots.SlotLimits(num_slots=4, max_slot_lease_s=8.0)
ONE_SLOT = slots.SlotLimits(num_slots=1)
WIPED = slots.SlotLimits(num_slots=1, wipe=True)
DUE = DeadlinePassed()


@dataclass(eq=False)
class Memory:
    """Staging memory of a device."""

    memory_kind: Literal["DRAM", "VRAM"] = "DRAM"
    nixl_device: int = 0
    device: str = "host"

    def address(self, slot: int) -> int:
        return 100 * slot


HOST, GPU = Memory(), Memory("VRAM", 1)
# fmt: off
PACK = Pack(
    agent_boot="boot", engine_id="engine", memory_id="memory", offer_id="offer", epoch=1, rank=0,
    tile=Tile("full", (0,), (KvPart.KEY,), 0, 1, 0, 8), table=BlockTable.of([1]),
    slot_lease_s=2.0, token="token", rank_secret="rank_secret",
)
# fmt: on


def asked(
    name: str, lease: Hashable = "lease", *, memory: Memory = HOST, **changes: Any
) -> slots.SlotWanted:
    """Request a tile; its name is the work, and the handle of the reply."""
    return slots.SlotWanted(replace(PACK, **changes), lease, "reader", memory, 80, name, name)


def gathered(slot_id: int = 1, error: Any = None) -> slots.GatherEnded:
    return slots.GatherEnded(slot_id, error)


def given(slot_id: int = 1, reader: str = "reader") -> slots.SlotReleased:
    return slots.SlotReleased((slot_id,), reader)


def done(commands: list[slots.Command]) -> str:
    """The started work and the answers: the id of a packed tile, the code of a refusal."""
    words = []
    for command in commands:
        match command:
            case slots.StartGather():
                words.append(f"gather {command.wanted.work}")
            case slots.StartWipe():
                words.append("wipe")
            case SendReply(reply_to, Packed(slot_id)):
                words.append(f"{reply_to} has {slot_id}")
            case Refuse():
                words.append(f"{command.reply_to}: {command.error.code}")
    return ", ".join(words)


Scene = tuple[slots.Event, str] | tuple[float, slots.Event] | tuple[float, slots.Event, str]
Step = slots.Event | Scene | int | slots.SlotLimits


def play(*steps: Step) -> None:
    """Handle each event; it comes when the one before did, unless it has a time.

    A number is how many slots are in use then.
    """
    table, now = slots.SlotTable(LIMITS), 0.0
    for step in steps:
        if isinstance(step, slots.SlotLimits):
            table = slots.SlotTable(step)
        elif isinstance(step, int):
            assert table.num_slots_in_use == step
        else:
            parts: list[Any] = [*step] if isinstance(step, tuple) else [step]
            now = parts.pop(0) if isinstance(parts[0], int | float) else now
            event, *expected = parts
            words = done(table.handle(event, now))
            assert expected in ([], [words]), (now, event)


WITHDRAWN = slots.LeaseEnded("lease", ErrorCode.OFFER_WITHDRAWN)
# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    "a reader gets its slot when the copy has ended and not before": [(1, asked("a"), "gather a"),
        (2, gathered(), "a has 1"), 1],
    "an abandoned tile is not gathered": [ONE_SLOT, asked("a"), asked("b"), asked("c"),
        (1, slots.TileCancelled("lease", "b"), "b: busy"), (gathered(), "a has 1"),
        (given(), "gather c"), 1],
    "the slot of an abandoned tile is free when its copy has ended": [asked("a"),
        (1, slots.TileCancelled("lease", "a"), "a: busy"), (gathered(), ""), 0],
    "a copy that failed is the failure of its reader and frees the slot": [asked("a"),
        (1, gathered(1, SegmentError("gone")), "a: segment"), 0],
    "where slots are wiped the next gets one when that has ended": [WIPED, asked("a"), asked("b"),
        gathered(), (1, given(), "wipe"), (slots.WipeEnded(1), "gather b"), 1],
    "a tile of another device needs no slot of this one": [ONE_SLOT, asked("a"),
        (1, asked("b", memory=GPU), "gather b"), 2, (gathered(2), "b has 2"),
        (gathered(1), "a has 1"), (given(2), ""), 1],
    "a slot that is given back goes to the next under another id": [ONE_SLOT, asked("a"),
        asked("b"), gathered(), (1, given(), "gather b"), (gathered(2), "b has 2"), 1],
    "what is not the reader's to give back stays in use": [ONE_SLOT, asked("a"), gathered(),
        given(), asked("b"), gathered(2), (1, given(1), ""), (given(3), ""),
        (given(2, "another"), ""), 1],
    "leases take turns, so that a short fetch is not behind a long one": [ONE_SLOT,
        asked("a1", "a"), asked("a2", "a"), asked("a3", "a"), asked("b1", "b"), gathered(1),
        (1, given(1), "gather a2"), gathered(2), (given(2), "gather b1"), 1],
    "a lease that holds half of the slots waits and others do not": [asked("a1", "a"), gathered(1),
        asked("a2", "a"), gathered(2), (1, asked("a3", "a"), ""), (asked("b1", "b"), "gather b1"),
        3],
    "an urgent tile is gathered before those that wait": [ONE_SLOT, asked("a"), asked("b"),
        asked("c", "other", priority=1), gathered(), (1, given(), "gather c"), 1],
    "the end of a lease frees its slots, refuses what waits and leaves what is copied": [
        asked("a1"), gathered(1), asked("a2"), asked("a3"),
        (1, WITHDRAWN, "a2: offer_withdrawn, a3: offer_withdrawn"), 1],
    "a slot that is copied into when its lease ends is free only when the copy ends": [ONE_SLOT,
        asked("a"), (1, slots.LeaseEnded("lease", ErrorCode.LEASE_EXPIRED), "a: lease_expired"),
        asked("b", "other"), (gathered(), "gather b"), 1],
    "a slot that is copied into when its engine is lost is free only when the copy ends": [ONE_SLOT,
        asked("a"), (1, EngineLost("engine"), "a: engine_lost"), asked("b", "other"),
        (gathered(), "gather b"), 1],
    "an agent that stops refuses what is copied and packs no more": [ONE_SLOT, asked("a"),
        (1, Stopped(), "a: closed"), (asked("b"), "b: closed"), 1],
    "the lease of a slot counts from the request and frees it": [asked("a", slot_lease_s=2.0),
        (1.5, gathered()), (1.999, DUE), (2, DUE, ""), 0],
    "a slot is leased for no longer than the limit": [asked("a", slot_lease_s=100.0),
        (1, gathered()), (8, DUE, ""), 0],
    "a tile that waited longer than its slot lease is refused": [ONE_SLOT,
        asked("a", slot_lease_s=4.0), asked("b"), (2, DUE, "b: timeout"), (gathered(), "a has 1"),
        1],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_becomes_of_tiles_and_slots(script: list[Step]) -> None:
    play(*script)
