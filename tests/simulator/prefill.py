"""A prefill agent: the real tables of offers and slots, and what its shell does around them.

What it does with requests and commands follows `kvbus_prefill.agent` and `kvbus_prefill.gather`.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol import Empty, Message, Outcome, Ticket
from kvbus.table import Driver
from kvbus_prefill.meeting import events as meeting
from kvbus_prefill.meeting.table import MeetingTable
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.table import OfferTable
from kvbus_prefill.slots.events import EngineLost as SlotEngineLost
from tests.simulator.checker import check
from tests.simulator.comparing import Digest, digest
from tests.simulator.gathering import Gathering, Pack, Unpack
from tests.simulator.leases import CheckedOfferTable
from tests.simulator.memory import Memory, Offer
from tests.simulator.network import Request, Server

if TYPE_CHECKING:
    from tests.simulator.fabric import Job
    from tests.simulator.world import World

REMEMBERED = 256
HINTED = ("offer.extended", "offer.sealed", "lease.revoked", "lease.expired", "lease.ended")


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a decode agent asks before its first claim."""

    reply_to: Any


@dataclass(frozen=True, slots=True)
class CheckMemory:
    """A reader has something in flight, and wants it served for so long."""

    progress_s: float
    reply_to: Any


class Unheard:
    """Who does not listen to the answer."""

    def reply(self, message: Message) -> None:
        """Said to nobody."""

    def refuse(self, error: KVBusError) -> None:
        """Said to nobody."""


UNHEARD = Unheard()


class PrefillAgent:
    """One prefill agent on its machine, and the engine beside it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.process = world.process(name)
        self.offers: dict[str, Offer] = {}
        self._over: deque[str] = deque()
        self.num_progress = 0
        self.waiting_reads: list[Job] = []
        self.server = Server(
            world.network,
            self.process,
            boot="",
            max_replies=world.settings.max_replies,
            handle=self._handle,
        )
        self.memory = Memory(world.settings.load.blocks, world.writes)
        self.start()

    @property
    def engine_id(self) -> str:
        """The engine, in this life of it."""
        return f"{self.name}-engine"

    def start(self) -> None:
        """A new process, with empty tables."""
        self.boot = f"{self.name}-boot-{self.process.life}"
        self.server.start(self.boot)
        self.table: OfferTable = CheckedOfferTable(self.world.settings.offers, self.offers)
        self.driver: Driver[ev.Event] = Driver(self.table, self.process)
        self.driver.commands |= {
            ev.BeginLease: self._begin_lease,
            ev.EndLease: self._end_lease,
            ev.ReportReleased: self._report_released,
            ev.Publish: self._publish,
        }
        self.meetings = MeetingTable(self.world.settings.meetings)
        self.meeting: Driver[meeting.Event] = Driver(self.meetings, self.process)
        self.meeting.commands |= {meeting.Withdraw: self._withdraw_forgone}
        self.gathering = Gathering(self)
        self.num_progress = 0

    def open(self, offer: Offer, opened: ev.Opened, ticket: Ticket) -> None:
        """The engine makes an offer, which may have a name that somebody waits for."""
        try:
            if offer.transfer_id:
                self.meetings.check_free(offer.transfer_id)
        except KVBusError as error:
            opened.reply_to.refuse(error)
            return
        self.tell(opened)
        if offer.transfer_id and offer.offer_id in self.table.live:
            fields = {"ticket": ticket, "secret": ticket.secret}
            self.meeting.dispatch(meeting.Made(offer.transfer_id, offer.offer_id, fields))

    def tell(self, event: ev.Event) -> None:
        """Something happens to an offer."""
        self.driver.dispatch(event)
        limits = self.table.limits
        is_bounded = len(self.table.live) <= limits.max_offers
        num_awaited = sum(not one.offer_id for one in self.meetings.live.values())
        is_bounded &= num_awaited <= self.meetings.limits.max_names
        check(is_bounded and len(self.table.retired) <= limits.max_retired, 6, "too many offers")

    def end(self) -> None:
        """The process is gone; its engine sees that, and uses its blocks again."""
        self.process.end()
        for offer in list(self.offers.values()):
            if not offer.outcome:
                self.free(offer, "agent lost")
        self.offers.clear()
        self._over.clear()
        waiting, self.waiting_reads = self.waiting_reads, []
        for job in waiting:
            job.fail()

    def lose_engine(self) -> None:
        """The engine ends and comes back: what it had in its memory is gone."""
        self.tell(ev.EngineLost(self.engine_id))
        self.gathering.tell(SlotEngineLost(self.engine_id))
        self.meeting.dispatch(meeting.EnginesGone())
        self.meeting.dispatch(meeting.EngineReady())
        for offer in self.offers.values():
            if not offer.told and not offer.outcome:
                self.free(offer, "engine lost")
            check(offer.outcome, 4, "an offer outlives its engine", offer)
        for block in range(len(self.memory.cells)):
            self.memory.write(block)
        self.memory = Memory(self.world.settings.load.blocks, self.world.writes)

    def free(self, offer: Offer, outcome: Outcome | str) -> None:
        """The blocks are the engine's again."""
        check(not offer.outcome, 4, "an offer is released twice", offer)
        offer.outcome = outcome
        has_state = offer.state_block is not None
        offer.memory.give_back(
            [*offer.reserved, offer.state_block] if has_state else offer.reserved
        )
        self.world.counts[f"offers {outcome}"] += 1

    @property
    def drives(self) -> bool:
        """Whether reads go on that need this process to."""
        return self.process.up and not self.process.stopped and self.num_progress > 0

    def resume(self) -> None:
        """The process goes on, and what waited for it."""
        self.process.resume()
        self._let_land()

    def hold_progress(self) -> None:
        """Reads of this agent's memory go on from now on."""
        self.num_progress += 1
        self._let_land()

    def _let_land(self) -> None:
        if self.waiting_reads and self.drives:
            waiting, self.waiting_reads = self.waiting_reads, []
            for job in waiting:
                self.world.clock.at(self.world.clock.now + 1e-4, job.land)

    def drop_progress(self) -> None:
        """One reason less."""
        self.num_progress -= 1
        check(self.num_progress >= 0, 10, "{name} drives less than nothing", name=self.name)

    def _handle(self, request: Request) -> None:
        """A request that is new, and for this process."""
        event = request.event
        try:
            match event:
                case Handshake():
                    request.reply(Empty())
                case CheckMemory(progress_s):
                    self.hold_progress()
                    late_s = self.world.settings.late_read_s
                    self.process.after(progress_s + late_s, self.drop_progress)
                    request.reply(Empty())
                case Pack():
                    self.gathering.pack(event)
                case Unpack():
                    self.gathering.unpack(event)
                case meeting.Awaited() | meeting.Forgone():
                    self.meeting.dispatch(event)
                case Digest():
                    digest(self, event)
                case _:
                    self.tell(event)
        except KVBusError as error:
            request.refuse(error)

    def _withdraw_forgone(self, command: meeting.Withdraw) -> None:
        self.tell(ev.Withdrawn(command.offer_id, command.secret, command.reply_to))

    def _begin_lease(self, _command: ev.BeginLease) -> None:
        self.hold_progress()

    def _end_lease(self, command: ev.EndLease) -> None:
        self.gathering.end_lease(command)
        if command.reason == "ended":
            self.drop_progress()
        else:
            self.world.counts[f"leases {command.reason}"] += 1
            self.process.after(self.world.settings.late_read_s, self.drop_progress)

    def _report_released(self, command: ev.ReportReleased) -> None:
        """What is over is remembered for a while: late messages are still about it."""
        self.free(self.offers[command.offer_id], command.outcome)
        over = LocalError("the offer is over", code=ErrorCode(f"offer_{command.outcome}"))
        self.meeting.dispatch(meeting.Ended(command.offer_id, over))
        self._over.append(command.offer_id)
        if len(self._over) > REMEMBERED:
            del self.offers[self._over.popleft()]

    def _publish(self, command: ev.Publish) -> None:
        """Those who read the offer may hear of it."""
        if command.op not in HINTED:
            return
        offer = self.offers[command.body.offer_id]
        for fetch in offer.readers:
            agent = fetch.agent
            if not fetch.outcome:
                self.world.network.send(agent.process, agent.hear_of, fetch)
