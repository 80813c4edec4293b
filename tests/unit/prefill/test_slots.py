"""The slot table: whose tile is gathered next, into which slot, and when a slot is free again.

Each case is a script: events, some with the time and what must be done. See `done`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

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
    """Of a device."""

    memory_kind: Literal["DRAM", "VRAM"] = "DRAM"
    nixl_device: int = 0
    device: str = "host"

    def address(self, slot: int) -> int:
        return 100 * slot


HOST, GPU = Memory(), Memory("VRAM", 1)


def asked(
    name: str,
    lease: Hashable = "lease",
    *,
    num_bytes: int = 80,
    slot_lease_s: float = 2.0,
    priority: int = 0,
    memory: Memory = HOST,
) -> slots.SlotWanted:
    """The name is what is gathered, and who waits for the answer."""
    pack = Pack(
        agent_boot="boot",
        engine_id="engine",
        memory_id="memory",
        offer_id="offer",
        epoch=1,
        rank=0,
        tile=Tile("full", (0,), (KvPart.KEY,), 0, 1, 0, 8),
        table=BlockTable.of([1]),
        slot_lease_s=slot_lease_s,
        token="token",
        rank_secret="rank_secret",
        priority=priority,
    )
    return slots.SlotWanted(pack, lease, "reader", memory, num_bytes, name, name)


def gathered(slot_id: int = 1, error: Any = None) -> slots.GatherEnded:
    return slots.GatherEnded(slot_id, error)


def given(slot_id: int = 1, reader: str = "reader") -> slots.GivenBack:
    return slots.GivenBack((slot_id,), reader)


def done(commands: list[slots.Command]) -> list[str]:
    """What is begun or answered: of a tile that is packed its id, of a refusal the code."""
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
    return words


Step = (
    slots.Event
    | tuple[float, slots.Event]
    | tuple[float, slots.Event, list[str]]
    | int
    | slots.SlotLimits
)


def play(*steps: Step) -> None:
    """Tell a table each event; an event alone comes when the one before did.

    A number is how many slots are in use then.
    """
    table, now = slots.SlotTable(LIMITS), 0.0
    for step in steps:
        if isinstance(step, slots.SlotLimits):
            table = slots.SlotTable(step)
            continue
        if isinstance(step, int):
            assert table.num_slots_in_use == step
            continue
        event, expected = step, None
        if isinstance(step, tuple):
            now, event, *rest = step
            expected = rest[0] if rest else None
        commands = done(table.handle(event, now))
        assert expected is None or commands == expected, (now, event)


WITHDRAWN = slots.LeaseEnded("lease", ErrorCode.OFFER_WITHDRAWN)
# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    "a reader is told of its slot when the copy has ended and not before":
        [(1, asked("a"), ["gather a"]), (2, gathered(), ["a has 1"]), 1],
    "a tile that nobody waits for is not gathered":
        [ONE_SLOT, asked("a"), asked("b"), asked("c"),
         (1, slots.TileAbandoned("lease", "b"), ["b: busy"]),
         (1, gathered(), ["a has 1"]), (1, given(), ["gather c"]), 1],
    "the slot of a tile that nobody waits for is free when its copy has ended":
        [asked("a"), (1, slots.TileAbandoned("lease", "a"), ["a: busy"]), (1, gathered(), []), 0],
    "a copy that failed is the failure of its reader and frees the slot":
        [asked("a"), (1, gathered(1, SegmentError("gone")), ["a: segment"]), 0],
    "where slots are wiped the next gets one when that has ended":
        [WIPED, asked("a"), asked("b"), gathered(), (1, given(), ["wipe"]),
         (1, slots.WipeEnded(1), ["gather b"]), 1],
    "a tile of another device needs no slot of this one":
        [ONE_SLOT, asked("a"), (1, asked("b", memory=GPU), ["gather b"]), 2,
         (1, gathered(2), ["b has 2"]), (1, gathered(1), ["a has 1"]), (1, given(2), []), 1],
    "a slot that is given back goes to the next under another id":
        [ONE_SLOT, asked("a"), asked("b"), gathered(), (1, given(), ["gather b"]),
         (1, gathered(2), ["b has 2"]), 1],
    "what is not the reader's to give back stays in use":
        [ONE_SLOT, asked("a"), gathered(), given(), asked("b"), gathered(2), (1, given(1), []),
         (1, given(3), []), (1, given(2, "another"), []), 1],
    "leases take turns, so that a short fetch is not behind a long one":
        [ONE_SLOT, asked("a1", "a"), asked("a2", "a"), asked("a3", "a"), asked("b1", "b"),
         gathered(1), (1, given(1), ["gather a2"]),
         gathered(2), (1, given(2), ["gather b1"]), 1],
    "a lease that holds half of the slots waits and others do not":
        [asked("a1", "a"), gathered(1), asked("a2", "a"), gathered(2), (1, asked("a3", "a"), []),
         (1, asked("b1", "b"), ["gather b1"]), 3],
    "an urgent tile is gathered before those that wait":
        [ONE_SLOT, asked("a"), asked("b"), asked("c", "other", priority=1),
         gathered(), (1, given(), ["gather c"]), 1],
    "the end of a lease frees its slots, refuses what waits and leaves what is copied":
        [asked("a1"), gathered(1), asked("a2"), asked("a3"),
         (1, WITHDRAWN, ["a2: offer_withdrawn", "a3: offer_withdrawn"]), 1],
    "a slot that is copied into when its lease ends is free only when the copy ends":
        [ONE_SLOT, asked("a"),
         (1, slots.LeaseEnded("lease", ErrorCode.LEASE_EXPIRED), ["a: lease_expired"]),
         asked("b", "other"), (1, gathered(), ["gather b"]), 1],
    "a slot that is copied into when its engine is lost is free only when the copy ends":
        [ONE_SLOT, asked("a"), (1, EngineLost("engine"), ["a: engine_lost"]),
         asked("b", "other"), (1, gathered(), ["gather b"]), 1],
    "an agent that stops refuses what is copied and packs no more":
        [ONE_SLOT, asked("a"), (1, Stopped(), ["a: closed"]), (1, asked("b"), ["b: closed"]),
         1],
    "the lease of a slot counts from the request and frees it":
        [asked("a", slot_lease_s=2.0), (1.5, gathered()), (1.999, DUE), (2, DUE, []), 0],
    "a slot is leased for no longer than the limit":
        [asked("a", slot_lease_s=100.0), (1, gathered()), (8, DUE, []), 0],
    "a tile that waited longer than its slot lease is refused":
        [ONE_SLOT, asked("a", slot_lease_s=4.0), asked("b"), (2, DUE, ["b: timeout"]),
         (2, gathered(), ["a has 1"]), 1],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_becomes_of_tiles_and_slots(script: list[Step]) -> None:
    play(*script)
