"""The reads of a decode agent: the real table, and what moves its bytes.

What it does follows `kvbus_decode.read.reader` and `kvbus_decode.read.pack_client`.
"""

from collections.abc import Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable
from kvbus.table import Driver
from kvbus_decode.fetch.events import ChunkRead, ReadChunk
from kvbus_decode.read import events as ev
from kvbus_decode.read.leg import Leg, Stage
from kvbus_decode.read.table import ReadTable
from kvbus_prefill.offer.entry import OfferedBox
from tests.simulator.checker import check
from tests.simulator.comparing import Comparing
from tests.simulator.fabric import Box, Copy, Job, Read, aborted
from tests.simulator.gathering import NOTHING, Pack, Packed, Unpack
from tests.simulator.memory import BLOCK_SIZE, Fetch
from tests.simulator.network import Outcome

if TYPE_CHECKING:
    from tests.simulator.decode import DecodeAgent
    from tests.simulator.prefill import PrefillAgent

STAGES = {
    "direct": (Stage.READ,),
    "tcp": (Stage.READ,),
    "mapped": (Stage.COPY,),
    "reordered": (Stage.PACK, Stage.READ),
    "packed": (Stage.PACK, Stage.READ, Stage.COPY),
}
UNPACK_TIMEOUT_S = 5.0
GRACE_S = 2.0


class Reading:
    """All reads of one decode agent, and its slots."""

    def __init__(self, agent: "DecodeAgent") -> None:
        self.agent = agent
        limits = agent.world.settings.reads
        self.table = ReadTable(limits)
        self._driver: Driver[ev.Event] = Driver(self.table, agent.process)
        self.tell = self._driver.dispatch
        self._slots: list[list[int]] = [[] for _ in range(limits.num_slots)]
        self._users: list[Leg | None] = [None] * limits.num_slots
        self._chunks: dict[str, ReadChunk] = {}
        self._running: dict[Read, None] = {}
        comparing = Comparing(self)
        self._driver.commands |= {
            ev.AskPack: self._ask_pack,
            ev.ReleaseSlots: self._release,
            ev.PostRead: self._post,
            ev.StartCopy: self._start_copy,
            ev.AskDigests: comparing.ask,
            ev.StartCompare: comparing.start,
            ev.AbortRead: self._abort,
            ev.RecycleTransport: self._recycle,
            ev.AbortCopy: self._abort,
            ev.ChunkEnded: self._end,
        }

    def start(self, fetch: Fetch, command: ReadChunk) -> None:
        """Read a chunk, by the path of the fetch; without a lease nothing can be packed."""
        stages = STAGES[fetch.kind]
        check(command.epoch or Stage.PACK not in stages, 2, "packed without a lease", fetch)
        boxes = list(self._boxes(fetch, command, 2 if Stage.PACK in stages else 4))
        legs = [Leg(stages, box, fetch.offer.agent, "cpu") for box in boxes]
        if fetch.compares:
            compared = self._boxes(fetch, command, 4)
            legs[:0] = [Leg((Stage.COMPARE,), box, fetch.offer.agent) for box in compared]
        self._chunks[fetch.fetch_id] = command
        self.tell(ev.ChunkWanted(fetch.fetch_id, fetch.memory, tuple(legs), path=fetch.kind))
        limits = self.table.limits
        check(len(self.table.retired) <= limits.max_retired, 6, "too many reads are remembered")

    def stop(self, fetch_id: str) -> None:
        """Nobody wants the chunk any more."""
        self.tell(ev.ReadStopped(fetch_id, aborted()))

    def fill_slot(self, leg: Leg, start: int, found: list[int]) -> None:
        """Bytes arrive in a slot of ours."""
        self._own(leg)[start : start + len(found)] = found

    def slot_of(self, leg: Leg) -> list[int]:
        """What stands in a slot of ours."""
        return self._own(leg)

    def end_read(self, job: Read) -> None:
        """The fabric has done with it; the agent hears of that when it runs."""
        del self._running[job]
        job.box.fetch.in_flight -= job.writes_blocks
        self._tell_soon(job, ev.ReadEnded)

    def end_copy(self, job: Job) -> None:
        """No thread is at it any more."""
        job.box.fetch.in_flight -= 1
        self._tell_soon(job, ev.CopyEnded)

    def _tell_soon(self, job: Job, kind: type[ev.ReadEnded] | type[ev.CopyEnded]) -> None:
        error = aborted() if job.aborted else job.error
        event = kind(job.key, job.leg, 0 if error else len(job.box.pairs), error)
        process, clock = self.agent.process, self.agent.world.clock
        clock.at(clock.now, self.tell, event, process=process, life=job.life)

    def _own(self, leg: Leg) -> list[int]:
        check(leg.slot is not None, 6, "a leg without a slot")
        slot = leg.slot or 0
        check(self._users[slot] is leg, 6, "a slot is another leg's by now", leg.work.fetch)
        return self._slots[slot]

    def _boxes(self, fetch: Fetch, chunk: ReadChunk, most_pairs: int) -> Iterator[Box]:
        table = chunk.tables["full"]
        first, end = chunk.start // BLOCK_SIZE, -(-chunk.stop // BLOCK_SIZE)
        begins_at = fetch.first_token // BLOCK_SIZE
        for start in range(first, end, most_pairs):
            numbers = range(start, min(start + most_pairs, end))
            pairs = [(table.block(i), fetch.blocks[i - begins_at]) for i in numbers]
            yield Box(fetch, "full", start, pairs)
        if chunk.last and fetch.state_block is not None:
            yield Box(fetch, "state", 0, [(chunk.tables["state"].block(0), fetch.state_block)])

    def offered(self, key: Hashable, box: Box) -> OfferedBox:
        """The box as the offer has it, with all that gives a right to it."""
        chunk, sources = self._chunks[str(key)], [source for source, _ in box.pairs]
        ids = b"".join(block.to_bytes(4, "little") for block in sources)
        return OfferedBox(
            offer_id=box.fetch.offer.offer_id,
            epoch=chunk.epoch,
            token=chunk.token,
            group=box.group,
            table=BlockTable(ids, first_block=box.start),
            stop=min(chunk.stop, BLOCK_SIZE * (box.start + len(sources))),
            opaque=box.group == "state",
            secret="secret",
        )

    def _ask_pack(self, command: ev.AskPack) -> None:
        box: Box = command.leg.work
        fetch, offered = box.fetch, self.offered(command.key, box)
        sources = tuple(source for source, _ in box.pairs)
        timeout_s = max(1e-3, fetch.deadline - self.agent.process.time())
        lease_s = self.agent.table.limits.lease_s
        on_reply = partial(self._on_packed, command)
        client = self.agent.client(fetch.offer.agent)
        boot = fetch.offer.boot
        client.ask(boot, timeout_s, on_reply, Pack, offered, sources, lease_s, command.done)

    def _on_packed(self, command: ev.AskPack, packed: Outcome) -> None:
        if isinstance(packed, Packed):
            command.leg.work.slot = packed.slot
            self.tell(ev.SlotPacked(command.key, command.leg, packed.slot_id, packed.slot_lease_s))
        elif isinstance(packed, KVBusError):
            self.tell(ev.PackFailed(command.key, command.leg, packed))

    def _release(self, command: ev.ReleaseSlots) -> None:
        source: PrefillAgent = command.source
        client = self.agent.client(source)
        if client.watch.current is not None:
            boot = client.watch.current
            client.ask(boot, UNPACK_TIMEOUT_S, lambda _: None, Unpack, command.slot_ids)

    def _post(self, command: ev.PostRead) -> None:
        leg = command.leg
        if leg.slot is not None:
            user = self._users[leg.slot]
            is_idle = user is None or user.work.job is None
            check(is_idle, 6, "a slot of ours is given on while it is used", leg.work.fetch)
            self._users[leg.slot] = leg
            self._slots[leg.slot] = [NOTHING] * len(leg.work.pairs)
        read = Read(self, command.key, leg)
        self._running[read] = None
        self._begin(read)

    def _start_copy(self, command: ev.StartCopy) -> None:
        self._begin(Copy(self, command.key, command.leg))

    def _begin(self, job: Read | Copy) -> None:
        fetch, box = job.box.fetch, job.box
        check(not fetch.outcome, 3, "a read begins after the end of its fetch", fetch)
        check(box.job is None, 3, "a leg does two things at a time", fetch)
        box.job = job
        fetch.in_flight += job.writes_blocks
        job.start()

    def _abort(self, command: ev.AbortRead | ev.AbortCopy) -> None:
        job: Job | None = command.leg.work.job
        if job is not None:
            job.aborted = True

    def _recycle(self, _: ev.RecycleTransport) -> None:
        """NIXL is made anew: after a while all READs end, and nothing of them lands any more."""
        self.agent.world.counts["recycled"] += 1
        self.agent.process.after(GRACE_S, self._end_all)

    def _end_all(self) -> None:
        for read in list(self._running):
            read.fail()

    def _end(self, ended: ev.ChunkEnded) -> None:
        fetch_id = str(ended.key)
        del self._chunks[fetch_id]
        event = ChunkRead(fetch_id, ended.num_bytes, ended.error, ended.path)
        self.agent.tell(event)
