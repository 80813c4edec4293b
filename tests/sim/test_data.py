"""Simulated data processes that die and freeze while one reads from the other.

The reader repeats a READ that failed, with what the running data process of its peer has
registered. Both sides and their jobs are the product's own.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import anyio
import numpy as np
import pytest

from kvbus.data import messages as wire
from kvbus.data.client import Defined
from kvbus.errors import KVBusError, LocalError, TransferFailed
from tests.sim.data import Machines, SimData, remains_released
from tests.sim.network import Network, Process
from tests.sim.nixl import Fabric
from tests.sim.world import Violation, World
from tests.support.data_process import FlatMemory, add_plan, moves

NUM_BLOCKS, BLOCK_BYTES, NUM_JOBS, NUM_FAULTS = 64, 32, 120, 20
POISON = 0xA5
SOON_S = 1000.0

Blobs = tuple[bytes, ...]
Facts = tuple[str, int, dict[str, int], Blobs]
"""The data process that runs, a memory, where it is there, and what connects to it."""


class Side:
    """One agent, of which there is the data process only, with two memories."""

    def __init__(self, world: World, machines: Machines, number: int) -> None:
        self.world, self.machines, self.name = world, machines, f"side-{number}"
        self.process = Process(self.name, f"10.0.0.{number}", world.new_loop(self.name))
        self.flat = [FlatMemory.of(NUM_BLOCKS, BLOCK_BYTES, seed=seed) for seed in (0, 1)]
        self.memories: list[Defined] = []
        self.facts: list[Facts] = []
        self.main = self.process.loop.create_task(self.run())
        world.watch(self.main, self.process.loop)

    async def run(self) -> None:
        boots = iter(range(1000))
        self.changed = anyio.Event()
        self.data = SimData(
            self.machines,
            self.process,
            new_boot=lambda: str(next(boots)),
            name=self.name,
            slice_bytes=1 << 20,
            copy_threads=2,
            on_change=lambda: self.changed.set(),  # noqa: PLW0108  # it is another one later
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.data.run)
            await self.data.until_running()
            for flat in self.flat:
                number = self.data.new_number()
                remove = wire.RemoveMemory(memory=number)
                self.memories.append(Defined(flat.added(number), remove, fds=[flat.segment.fd]))
                await self.data.define(self.memories[-1])
            with suppress(TransferFailed):  # the next one opens it
                await self.data.open_nixl()
            await self.work()
            tasks.cancel_scope.cancel()

    async def work(self) -> None:
        """Have progress driven, and publish what a handshake would."""
        self.data.drive_progress()
        while True:
            self.facts = []
            with suppress(KVBusError):
                self.facts = [await self._facts_of(memory) for memory in self.memories]
            await self.changed.wait()
            self.changed = anyio.Event()

    async def _facts_of(self, memory: Defined) -> Facts:
        added = await self.data.result(memory)
        number = memory.number
        reply = await self.data.call(wire.Metadata(memories=(number,), devices=()))
        assert isinstance(added, wire.MemoryAdded)
        assert isinstance(reply.result, wire.MetadataBlobs)
        return self.data.nixl_name, number, added.addresses, reply.result.blobs


class Reader(Side):
    """Reads blocks of the other side's memories into its own, job after job."""

    def __init__(
        self, world: World, machines: Machines, source: Side, *, takes_stale: bool
    ) -> None:
        self.source, self.takes_stale = source, takes_stale
        self.num_done, self.codes = 0, set[str]()
        self.known: list[Facts] = []
        super().__init__(world, machines, 2)

    async def work(self) -> None:
        for flat in self.flat:
            flat.content[:] = POISON
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(self._read_all, range(number, NUM_JOBS, 4), number)

    async def _read_all(self, jobs: range, number: int) -> None:
        blocks = range(number * 16, number * 16 + 16)
        for job in jobs:
            target, which = self.flat[job % 2].blocks[blocks], job // 2 % 2
            assert (self.flat[job % 2].blocks[blocks] == POISON).all(), "it landed after its end"
            while not await self._read(which, job % 2, list(blocks)):
                self.flat[job % 2].blocks[blocks] = POISON
                await anyio.sleep(self.world.luck.delay_s(0.02))
                await self.data.until_running()
            self.num_done += 1
            found = self.flat[job % 2].blocks[blocks]
            if not np.array_equal(found, self.source.flat[which].blocks[blocks]):
                self.world.fail("a READ is done, and has brought other bytes")
            self.flat[job % 2].blocks[blocks] = POISON
            del target

    async def _read(self, which: int, into: int, blocks: list[int]) -> bool:
        """Read once, perhaps by what was so a while ago; return whether it counts."""
        if not self.known or self.world.luck.chance(0.5):
            self.known = self.source.facts or self.known
        if not self.known:
            return False
        name, _, addresses, blobs = self.known[which]
        numbers = [self.data.new_number() for _ in range(2)]
        flat = self.source.flat[which]
        peer = Defined(wire.AddPeer(peer=name, metadata=blobs), wire.RemovePeer(peer=name))
        remote = wire.AddRemote(
            memory=numbers[0], peer=name, engine=flat.engine, rank=flat.rank, addresses=addresses
        )
        there = Defined(remote, wire.RemoveMemory(memory=numbers[0]), needs=(peer,))
        here = self.memories[into]
        plan = Defined(
            add_plan(numbers[1], numbers[0], here.number),
            wire.RemovePlan(plan=numbers[1]),
            needs=(there, here),
        )
        ended: asyncio.Future[wire.DataReply] = self.process.loop.create_future()
        read = wire.Read(plan=numbers[1], **moves(blocks, blocks))
        try:
            job = self.data.start(read, ended.set_result, uses=(plan,))
        except KVBusError:
            return False
        with anyio.move_on_after(self.world.luck.uniform(0.0, 0.2)):
            await asyncio.shield(ended)
        if not ended.done():
            job.abort()
        reply = await ended
        self.codes |= set() if reply.error is None else {reply.error.code}
        self.data.remove(plan)
        self.data.remove(there)
        self.data.remove(peer)
        is_stale = name != self.source.data.nixl_name and not self.takes_stale
        return reply.error is None and not is_stale


@contextmanager
def machines_of(seed: int, *, dies: float) -> Iterator[Machines]:
    """The machines of a world."""
    with remains_released():
        world = World(seed)
        network = Network(world)
        fabric = Fabric(network=network, part_s=5e-3)
        yield Machines(network=network, fabric=fabric, dies=dies)
        world.close()


@contextmanager
def pair(seed: int, *, dies: float, takes_stale: bool = False) -> Iterator[tuple[Side, Reader]]:
    """Both sides, in a world."""
    with machines_of(seed, dies=dies) as machines:
        source = Side(machines.world, machines, 1)
        yield source, Reader(machines.world, machines, source, takes_stale=takes_stale)


def suffer(world: World, *sides: Side, times: int = NUM_FAULTS) -> None:
    """Freeze data processes, or kill them, again and again."""
    side = world.luck.pick(sides)
    child = side.data.child if hasattr(side, "data") else None
    if child is not None and world.luck.chance(0.5):
        child.freeze()
        world.after(world.luck.delay_s(0.1), child.thaw)
    elif child is not None:
        child.die("killed by SIGKILL")
    if times:
        again = partial(suffer, world, *sides, times=times - 1)
        world.after(world.luck.delay_s(0.1), again)


@pytest.mark.parametrize("dies", [0.0, 0.001, 0.003])
@pytest.mark.parametrize("seed", range(4))
def test_jobs_end_once_and_bring_their_bytes(seed: int, dies: float) -> None:
    with pair(seed, dies=dies) as (source, reader):
        if dies:
            suffer(source.world, source, reader)

        assert source.world.run(reader.main.done, within_s=SOON_S)

        assert reader.num_done == NUM_JOBS
        assert reader.codes <= {"peer_lost", "transfer_failed", "cancelled"}
        assert (source.data.num_restarts + reader.data.num_restarts > 0) == (dies > 0)


def test_stale_bytes_of_earlier_data_process_fail_some_world() -> None:
    """Else worlds could not show that readers have to look."""

    def fails(seed: int) -> bool:
        with pair(seed, dies=0.0, takes_stale=True) as (source, reader):
            suffer(source.world, source)
            try:
                source.world.run(reader.main.done, within_s=SOON_S)
            except Violation as violation:
                return "other bytes" in str(violation)
            return False

    assert any(map(fails, range(20)))


class Leaver(Side):
    """Discards a memory, and looks for it in the next data process."""

    code, took_s = "", 0.0

    async def work(self) -> None:
        memory = self.memories[0]
        await self.data.discard(memory)
        self.flat[0].segment.close()
        self.changed = anyio.Event()
        self.data.kill("a test")
        await self.changed.wait()
        await self.data.until_running()
        began = self.world.now
        try:
            await self.data.result(memory)
        except LocalError as error:
            self.code, self.took_s = error.code, self.world.now - began


def test_memory_that_was_discarded_is_defined_no_more() -> None:
    with machines_of(seed=1, dies=0.0) as machines:
        leaver = Leaver(machines.world, machines, 1)

        assert machines.world.run(leaver.main.done, within_s=SOON_S)

        assert leaver.code == "engine_lost"
        assert not leaver.took_s  # nothing was sent: its descriptor is another file's by now


class Waiter(Side):
    """Waits for a data process while none can be started."""

    async def work(self) -> None:
        self.changed, self.data.is_forbidden = anyio.Event(), True
        self.data.kill("a test")
        await self.changed.wait()
        self.world.after(3.0, self.allow)
        await self.data.until_running()

    def allow(self) -> None:
        self.data.is_forbidden = False


def test_wait_for_data_process_ends_after_failed_starts() -> None:
    with machines_of(seed=1, dies=0.0) as machines:
        waiter = Waiter(machines.world, machines, 1)

        assert machines.world.run(waiter.main.done, within_s=SOON_S)

        assert waiter.data.is_running
