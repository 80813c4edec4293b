"""Which event does what to a leg in which state: the table, and its handlers.

Every handler returns the commands for the agent, in order. `kvbus_decode.read.table` does what
concerns more than one leg: whose turn it is, slots of ours, and the end of the chunk.
"""

from collections.abc import Mapping
from typing import Any

from kvbus.errors import KVBusError
from kvbus.table import Transition
from kvbus_decode.read import events as ev
from kvbus_decode.read.entry import ReadEntry
from kvbus_decode.read.leg import Leg, LegState, Stage

WANTED, PACKING, PACKED = LegState.WANTED, LegState.PACKING, LegState.PACKED
READING, COPYING, DELEGATED = LegState.READING, LegState.COPYING, LegState.DELEGATED
ASKING, KNOWN, COMPARING = LegState.ASKING, LegState.KNOWN, LegState.COMPARING
OVER = LegState.OVER

Commands = list[ev.Command]

USABLE_SHARE = 0.99
"""Of the lease of a slot: its holder counts by another clock, and ours may be the slower one. The
lease of an offer needs no such share: whether it has ended is asked. Of a slot nobody asks: what a
READ found there too late would be taken for good.
"""


def start(read: ReadEntry, leg: Leg, _event: ev.LegDue, now: float) -> Commands:
    """Its first stage."""
    leg.asked_at = now
    match leg.stages[0]:
        case Stage.PACK:
            leg.state = PACKING
            return [ev.AskPack(read.key, leg, tuple(read.read_slots.pop(leg.source, ())))]
        case Stage.READ:
            leg.state = READING
            return [ev.PostRead(read.key, leg)]
        case Stage.COPY:
            leg.state = COPYING
            return [ev.StartCopy(read.key, leg)]
        case Stage.DELEGATE:
            leg.state = DELEGATED
            return [ev.AskDelegate(read.key, leg)]
        case Stage.COMPARE:
            leg.state = ASKING
            return [ev.AskDigests(read.key, leg)]


def take_packed(read: ReadEntry, leg: Leg, event: ev.SlotPacked, _now: float) -> Commands:
    """The box lies at its holder: READ it, into a slot of ours once there is one."""
    leg.slot_id = event.slot_id
    leg.slot_expires_at = leg.asked_at + USABLE_SHARE * event.slot_lease_s
    if leg.needs_slot:
        leg.state = PACKED
        return []
    leg.state = READING
    return [ev.PostRead(read.key, leg)]


def read_into_slot(read: ReadEntry, leg: Leg, event: ev.SlotGranted, _now: float) -> Commands:
    """A slot of ours is free."""
    leg.slot, leg.state = event.slot, READING
    return [ev.PostRead(read.key, leg)]


def land(read: ReadEntry, leg: Leg, event: ev.ReadEnded, _now: float) -> Commands:
    """The READ is terminal; had the lease of its slot ended before, so would the read have."""
    read.num_bytes += event.num_bytes
    if event.error is not None:
        return _fail(read, leg, event.error)
    if read.error is not None or Stage.COPY not in leg.stages:
        leg.state = OVER
        return []
    leg.state = COPYING
    return [ev.StartCopy(read.key, leg)]


def end_copy(read: ReadEntry, leg: Leg, event: ev.CopyEnded, _now: float) -> Commands:
    """The threads are done with the blocks, and with the slot."""
    read.num_bytes += event.num_bytes
    if event.error is not None:
        return _fail(read, leg, event.error)
    leg.state = OVER
    return []


def end_delegate(read: ReadEntry, leg: Leg, event: ev.DelegateEnded, _now: float) -> Commands:
    """The other agent has said that it writes no more."""
    if event.error is not None:
        return _fail(read, leg, event.error)
    read.num_bytes += event.num_bytes
    read.path = read.path or event.path
    leg.state = OVER
    return []


def know(_read: ReadEntry, leg: Leg, _event: ev.DigestsCame, _now: float) -> Commands:
    """What should be in the blocks is known; what is there, when all has landed."""
    leg.state = KNOWN
    return []


def compare(read: ReadEntry, leg: Leg, _event: ev.OthersOver, _now: float) -> Commands:
    """All has landed."""
    leg.state = COMPARING
    return [ev.StartCompare(read.key, leg)]


def end_compare(read: ReadEntry, leg: Leg, event: ev.CompareEnded, _now: float) -> Commands:
    """The bytes are those of the holder, or they are not, or nobody knows: then they are none."""
    if event.error is not None:
        return _fail(read, leg, event.error)
    leg.state = OVER
    return []


def fail_pack(read: ReadEntry, leg: Leg, event: ev.PackFailed, _now: float) -> Commands:
    """The holder does not gather the box."""
    return _fail(read, leg, event.error)


def drop(_read: ReadEntry, leg: Leg, _event: ev.LegStopped, _now: float) -> Commands:
    """Nothing writes for it, so it is over at once."""
    leg.state = OVER
    return []


def abort_read(_read: ReadEntry, leg: Leg, _event: ev.LegStopped, _now: float) -> Commands:
    """NIXL cannot take back what was posted: the leg goes on until that is terminal."""
    return [ev.AbortRead(leg)]


def abort_copy(_read: ReadEntry, leg: Leg, _event: ev.LegStopped, _now: float) -> Commands:
    """A thread finishes the part that it is at, and until then the leg goes on."""
    return [ev.AbortCopy(leg)]


def abort_delegate(read: ReadEntry, leg: Leg, _event: ev.LegStopped, _now: float) -> Commands:
    """The other agent writes until it says that it does not."""
    return [ev.StopDelegate(read.key, leg)]


def abandon(_read: ReadEntry, leg: Leg, _event: ev.EngineGone, _now: float) -> Commands:
    """The other agent loses the engine as well, and sees to its own memory."""
    leg.state = OVER
    return []


def _fail(read: ReadEntry, leg: Leg, error: KVBusError) -> Commands:
    """The leg is over, and its read has failed; the first error counts."""
    leg.state = OVER
    read.error = read.error or error
    return []


TRANSITIONS: Mapping[tuple[LegState, type[Any]], Transition[LegState]] = {
    (WANTED, ev.LegDue): Transition(start, (PACKING, READING, COPYING, DELEGATED, ASKING)),
    (PACKING, ev.SlotPacked): Transition(take_packed, (PACKED, READING)),
    (PACKING, ev.PackFailed): Transition(fail_pack, (OVER,)),
    (PACKING, ev.LegStopped): Transition(drop, (OVER,)),
    (PACKED, ev.SlotGranted): Transition(read_into_slot, (READING,)),
    (PACKED, ev.LegStopped): Transition(drop, (OVER,)),
    (READING, ev.ReadEnded): Transition(land, (COPYING, OVER)),
    (READING, ev.LegStopped): Transition(abort_read, (READING,)),
    (COPYING, ev.CopyEnded): Transition(end_copy, (OVER,)),
    (COPYING, ev.LegStopped): Transition(abort_copy, (COPYING,)),
    (ASKING, ev.DigestsCame): Transition(know, (KNOWN,)),
    (ASKING, ev.CompareEnded): Transition(end_compare, (OVER,)),
    (ASKING, ev.LegStopped): Transition(drop, (OVER,)),
    (KNOWN, ev.OthersOver): Transition(compare, (COMPARING,)),
    (KNOWN, ev.LegStopped): Transition(drop, (OVER,)),
    (COMPARING, ev.CompareEnded): Transition(end_compare, (OVER,)),
    (COMPARING, ev.LegStopped): Transition(abort_copy, (COMPARING,)),
    (DELEGATED, ev.DelegateEnded): Transition(end_delegate, (OVER,)),
    (DELEGATED, ev.LegStopped): Transition(abort_delegate, (DELEGATED,)),
    (DELEGATED, ev.EngineGone): Transition(abandon, (OVER,)),
}
