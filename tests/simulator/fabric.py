"""What moves bytes: READs that nobody can call back, and threads that copy.

Bytes land in parts, each at a time of its own and as they are in memory by then. A READ goes on
while its process is stopped; one over TCP waits until the process that it reads is driven.
"""

from typing import TYPE_CHECKING, Any

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus_decode.read.leg import Leg, Stage
from tests.simulator.checker import check
from tests.simulator.gathering import NOTHING
from tests.simulator.memory import Fetch

if TYPE_CHECKING:
    from tests.simulator.prefill import PrefillAgent
    from tests.simulator.reading import Reading

FOR_EVER = float("inf")
LONGEST_WAIT_S = 30.0
"""Longer than that nobody waits to be driven, while both processes run."""


class Box:
    """The work of one leg: blocks of the offer, and the blocks of the fetch that they go to.

    ``slot`` is where the box lies at its holder, once it was packed; ``expected`` is what a leg
    that compares was told.
    """

    __slots__ = ("expected", "fetch", "group", "job", "pairs", "slot", "start")

    def __init__(self, fetch: Fetch, group: str, start: int, pairs: list[tuple[int, int]]) -> None:
        self.fetch, self.group, self.start, self.pairs = fetch, group, start, pairs
        self.slot: int | None = None
        self.expected: list[int] = []
        self.job: Any = None


class Job:
    """One READ or copy on its way, half of its bytes at a time."""

    __slots__ = (
        "aborted",
        "box",
        "error",
        "key",
        "leg",
        "life",
        "num_landed",
        "reading",
        "waits_since",
    )

    def __init__(self, reading: "Reading", key: object, leg: Leg) -> None:
        self.reading, self.key, self.leg = reading, key, leg
        self.box: Box = leg.work
        self.life = reading.agent.process.life
        self.num_landed = 0
        self.aborted = False
        self.error: KVBusError | None = None
        self.waits_since = 0.0

    @property
    def writes_blocks(self) -> bool:
        """Whether it writes into the engine's blocks, and not into a slot of ours."""
        return self.is_copy or not self.leg.needs_slot

    @property
    def is_copy(self) -> bool:
        """Whether threads of the process do it."""
        return self.leg.state == "copying"

    @property
    def is_alive(self) -> bool:
        """Whether the process that began it is still there."""
        process = self.reading.agent.process
        return process.up and process.life == self.life

    def _write_blocks(self, start: int, stop: int, found: list[int]) -> None:
        box, fetch = self.box, self.box.fetch
        if fetch.compares:
            found = [self._on_the_way(content) for content in found]
        for (_, target), content in zip(box.pairs[start:stop], found, strict=True):
            fetch.memory.land(target, content, fetch)

    def _on_the_way(self, content: int) -> int:
        """A bit may flip; who does not compare would never know."""
        world = self.reading.agent.world
        if world.random.random() >= world.settings.faults.flipped_bits:
            return content
        world.counts["bits flipped"] += 1
        return ~content


class Read(Job):
    """A READ: it ends when the fabric says so, not before ``ends_at``."""

    __slots__ = ("ends_at",)

    def start(self) -> None:
        """Post it."""
        world = self.reading.agent.world
        random, faults = world.random.random, world.settings.faults
        seconds = 5e-4 + 3e-3 * random() + (0.2 * random() if random() < 0.01 else 0.0)
        if not world.is_ending:
            if random() < faults.stalled_reads:
                seconds += 20.0 * random() if random() < 0.8 else FOR_EVER
            if random() < faults.failed_reads:
                self.error = RemoteError("fabric", code=ErrorCode.TRANSFER_FAILED)
        now = world.clock.now
        self.ends_at = now + seconds
        world.clock.at(now + min(seconds, 1.0) * random(), self.land)

    def land(self) -> None:
        """Half of it arrives, or all that is left."""
        box = self.box
        if not self.is_alive or box.job is not self:
            return
        source, needs_agent = box.fetch.offer.agent, box.fetch.kind == "tcp" or box.slot is not None
        if needs_agent and not (source.process.up and source.boot == box.fetch.offer.boot):
            self.fail()
            return
        if box.fetch.kind == "tcp" and not source.drives:
            self._wait_for(source)
            return
        if self.waits_since:
            self._check_wait(source)
        self._land_part()
        if self.num_landed == len(box.pairs):
            self._end()
        elif self.ends_at < FOR_EVER:
            clock = self.reading.agent.world.clock
            clock.at(max(clock.now, self.ends_at), self.land)

    def _wait_for(self, source: "PrefillAgent") -> None:
        self.waits_since = self.waits_since or self.reading.agent.world.clock.now
        source.waiting_reads.append(self)

    def _check_wait(self, source: "PrefillAgent") -> None:
        ours, theirs = self.reading.agent.process.resumed_at, source.process.resumed_at
        waited_s = self.reading.agent.world.clock.now - max(self.waits_since, ours, theirs)
        check(waited_s < LONGEST_WAIT_S, 10, "a READ waits to be driven", self.box.fetch)
        self.waits_since = 0.0

    def fail(self) -> None:
        """The connection broke; no more of it lands."""
        self.error = self.error or RemoteError("connection", code=ErrorCode.TRANSFER_FAILED)
        self._end()

    def _land_part(self) -> None:
        box, reading, start = self.box, self.reading, self.num_landed
        self.num_landed = stop = len(box.pairs) if start else (len(box.pairs) + 1) // 2
        random = reading.agent.world.random.random
        if (self.aborted or self.error is not None) and start and random() < 0.5:
            return
        if box.slot is None:
            cells = box.fetch.offer.memory.cells
            found = [cells[source] for source, _ in box.pairs[start:stop]]
        else:
            slot = box.fetch.offer.agent.gathering.slots[box.slot]
            found = [*slot, *[NOTHING] * len(box.pairs)][start:stop]
        if self.writes_blocks:
            self._write_blocks(start, stop, found)
        else:
            reading.fill_slot(self.leg, start, found)

    def _end(self) -> None:
        if self.box.job is self:
            self.box.job = None
            self.reading.end_read(self)


class Copy(Job):
    """A copy out of mapped memory, or out of a slot of ours; it stops with its process."""

    __slots__ = ()

    def start(self) -> None:
        """Begin in a thread."""
        random = self.reading.agent.world.random.random
        self.reading.agent.process.after(1e-4 + 5e-4 * random(), self.land)

    def land(self) -> None:
        """Half of it is copied, or all that is left."""
        box, start = self.box, self.num_landed
        if start and self.aborted:
            self._end()
            return
        self.num_landed = stop = len(box.pairs) if start else (len(box.pairs) + 1) // 2
        if Stage.READ in self.leg.stages:
            found = self.reading.slot_of(self.leg)[start:stop]
        else:
            cells = box.fetch.offer.memory.cells
            found = [cells[source] for source, _ in box.pairs[start:stop]]
        self._write_blocks(start, stop, found)
        if stop < len(box.pairs):
            self.reading.agent.process.after(2e-4, self.land)
        else:
            self._end()

    def _end(self) -> None:
        offer = self.box.fetch.offer
        if Stage.READ not in self.leg.stages and offer.memory is not offer.agent.memory:
            self.error = RemoteError("the map was closed", code=ErrorCode.TRANSFER_FAILED)
        self.box.job = None
        self.reading.end_copy(self)


def aborted() -> LocalError:
    """How what was aborted ends."""
    return LocalError("aborted", code=ErrorCode.CANCELLED)
