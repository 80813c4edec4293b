"""The staging slots of a prefill agent: the real table, slots with bytes in them, slow copies.

What it does follows `kvbus_prefill.gather`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbus.protocol import Empty, Message
from kvbus.table import Driver
from kvbus_prefill.offer.entry import OfferedBox
from kvbus_prefill.offer.events import EndLease
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.table import SlotTable
from tests.simulator.checker import check
from tests.simulator.memory import Memory

if TYPE_CHECKING:
    from tests.simulator.prefill import PrefillAgent

NOTHING = -1
"""What a slot holds that was wiped."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A reader wants blocks gathered into a slot; ``done`` are slots that it has read."""

    offered: OfferedBox
    blocks: tuple[int, ...]
    slot_lease_s: float
    done: tuple[int, ...]
    reply_to: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class Unpack:
    """A reader has read slots."""

    slot_ids: tuple[int, ...]
    reply_to: Any = field(repr=False)


class Packed(Message, frozen=True):
    """Reply to `Pack`: where the box lies."""

    slot_id: int
    slot: int
    slot_lease_s: float


class Gathering:
    """All slots of one agent, on one device."""

    def __init__(self, agent: "PrefillAgent") -> None:
        self._agent, self._world = agent, agent.world
        limits = agent.world.settings.slots
        self.table = SlotTable(limits)
        self.slots: list[list[int]] = [[] for _ in range(limits.num_slots)]
        self._busy: set[int] = set()
        self._driver: Driver[ev.Event] = Driver(self.table, agent.process)
        self._driver.commands |= {
            ev.StartGather: self._start_gather,
            ev.StartWipe: self._start_wipe,
            ev.ReplyPacked: self._reply_packed,
        }

    def tell(self, event: ev.Event) -> None:
        """Something happens to a box."""
        self._driver.dispatch(event)
        limits, table = self.table.limits, self.table
        is_bounded = table.num_waiting <= limits.max_waiting and len(self._busy) <= limits.num_slots
        check(is_bounded and len(table.retired) <= limits.max_retired, 6, "too many boxes")

    def pack(self, asked: Pack) -> None:
        """Raises what the offer table has against it."""
        offered, reader = asked.offered, asked.reply_to.client.sender.boot
        if asked.done:
            self.tell(ev.GivenBack(asked.done, reader))
        self._agent.table.check_box(offered, self._agent.process.time())
        self.tell(
            ev.SlotWanted(
                lease=(offered.offer_id, offered.epoch),
                reader=reader,
                engine_id=self._agent.engine_id,
                num_bytes=1,
                slot_lease_s=asked.slot_lease_s,
                work=(self._agent.memory, asked.blocks),
                reply_to=asked.reply_to,
            )
        )

    def unpack(self, asked: Unpack) -> None:
        """The reader is through with slots."""
        self.tell(ev.GivenBack(asked.slot_ids, asked.reply_to.client.sender.boot))
        asked.reply_to.reply(Empty())

    def end_lease(self, command: EndLease) -> None:
        """Nothing that was gathered under it is good any more."""
        if self.table.live:
            self.tell(ev.LeaseEnded((command.offer_id, command.epoch), command.code))

    def _start_gather(self, command: ev.StartGather) -> None:
        check(command.slot not in self._busy, 6, "a slot is gathered into twice")
        self._busy.add(command.slot)
        random = self._world.random.random
        self._agent.process.after(2e-4 * random(), self._gather, command, 0)

    def _gather(self, command: ev.StartGather, done: int) -> None:
        """Block by block: some of what the next owner has written may be among them."""
        memory: Memory
        memory, blocks = command.work
        slot, part = self.slots[command.slot], blocks[done : done + 1]
        if not done:
            slot.clear()
        slot += [memory.cells[block] for block in part]
        if done + 1 < len(blocks):
            self._agent.process.after(1e-4, self._gather, command, done + 1)
            return
        self._busy.discard(command.slot)
        self.tell(ev.GatherEnded(command.slot_id))

    def _start_wipe(self, command: ev.StartWipe) -> None:
        check(command.slot not in self._busy, 6, "a slot is wiped under a gather")
        self.slots[command.slot] = [NOTHING] * len(self.slots[command.slot])
        self._busy.add(command.slot)
        self._agent.process.after(1e-4, self._wiped, command)

    def _wiped(self, command: ev.StartWipe) -> None:
        self._busy.discard(command.slot)
        self.tell(ev.WipeEnded(command.slot_id))

    def _reply_packed(self, command: ev.ReplyPacked) -> None:
        packed = Packed(command.slot_id, command.slot, command.slot_lease_s)
        command.reply_to.reply(packed)
