"""What the agents copy comes after the GPU work that the engine recorded, and not before."""

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from kvbus.engine import Link, RankMemory
from kvbus.geometry import GroupSpec, KvLayout
from kvbus.memory.cuda import GpuAllocation, PinnedMemory
from tests.process.gpu.fake import delay, tensor_at
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.cuda.calls import Cuda, refused
from tests.support.engines import make_spec

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

GROUP = GroupSpec("full", (0, 1), 16, 8, 64, "bfloat16")
NUM_BLOCKS = 4
ALL: dict[str, Any] = {"num_tokens": NUM_BLOCKS * 16, "block_ids": {"full": range(NUM_BLOCKS)}}
NHD = KvLayout.parse("NHD")
OLD, NEW = 0x11, 0x22
SLOW_MS = 300
LATER_MS = 3000
"""Of work that nobody waits for: the handoff is over before it, also on a busy machine."""
NOT_READY = 600


class SlowEngine:
    """An engine whose GPU is late: a stream of its own writes the whole cache in the end."""

    def __init__(self) -> None:
        self.spec = make_spec(groups=(GROUP,))
        self.memory = RankMemory.allocate(self.spec, 0, NHD, num_blocks=NUM_BLOCKS, device="cuda:0")
        (storage,) = self.memory.storages.values()
        assert isinstance(storage, GpuAllocation)
        self._storage, self.cuda = storage, Cuda()
        with self.cuda.on(0):
            self.stream = self.cuda.stream().value or 0
        self._source = PinnedMemory(storage.size_bytes, 0)

    def write_late(self, byte: int, *, after_ms: int = SLOW_MS) -> None:
        self._source.bytes[:] = byte
        size_bytes = self._storage.size_bytes
        with self.cuda.on(0):
            delay(self.stream, after_ms)
            places = self._storage.address, self._source.address
            self.cuda.cuMemcpyAsync(*places, size_bytes, self.stream)

    def finish(self) -> None:
        with self.cuda.on(0):
            self.cuda.cuStreamSynchronize(self.stream)

    def content(self) -> set[int]:
        self.finish()
        return set(tensor_at(self._storage.address, self._storage.size_bytes).cpu().tolist())


@pytest.fixture
def engines() -> Iterator[tuple[SlowEngine, SlowEngine]]:
    """Their memory outlives what their GPUs still write."""
    made = SlowEngine(), SlowEngine()
    yield made
    for one in made:
        one.finish()


@pytest.mark.parametrize("path", ["auto", "packed"])
@pytest.mark.parametrize("is_recorded", [True, False])
async def test_late_writes_are_sent_if_they_are_recorded(
    shapes: ShapedAgents,
    engines: tuple[SlowEngine, SlowEngine],
    path: str,
    is_recorded: bool,
) -> None:
    source, target = engines
    source.write_late(OLD)
    source.finish()
    async with (
        Link(shapes.prefill.attach, source.spec, memory=source.memory) as prefill,
        Link(shapes.decode[path].attach, target.spec, memory=target.memory) as decode,
    ):
        source.write_late(NEW, after_ms=SLOW_MS if is_recorded else LATER_MS)
        after = prefill.record(stream=source.stream) if is_recorded else 0
        offer = await prefill.offer("r", after=after, **ALL)
        await decode.fetch(offer.ticket, **ALL).ended
        await offer.ended

    assert target.content() == {NEW if is_recorded else OLD}


@pytest.mark.parametrize("path", ["auto", "packed"])
@pytest.mark.parametrize("is_recorded", [True, False])
async def test_arrivals_come_after_late_writes_that_are_recorded(
    shapes: ShapedAgents,
    engines: tuple[SlowEngine, SlowEngine],
    path: str,
    is_recorded: bool,
) -> None:
    source, target = engines
    source.write_late(NEW)
    source.finish()
    async with (
        Link(shapes.prefill.attach, source.spec, memory=source.memory) as prefill,
        Link(shapes.decode[path].attach, target.spec, memory=target.memory) as decode,
    ):
        offer = await prefill.offer("r", **ALL)
        target.write_late(OLD, after_ms=SLOW_MS if is_recorded else LATER_MS)
        after = decode.record(stream=target.stream) if is_recorded else 0
        await decode.fetch(offer.ticket, after=after, **ALL).ended
        await offer.ended

    assert target.content() == {NEW if is_recorded else OLD}


# Each step is recorded before the one before it has ended. An offer waits for its own step alone.
async def test_a_step_loop_that_never_idles_starves_no_offer(
    shapes: ShapedAgents, engines: tuple[SlowEngine, SlowEngine]
) -> None:
    source, target = engines
    async with (
        Link(shapes.prefill.attach, source.spec, memory=source.memory) as prefill,
        Link(shapes.decode["auto"].attach, target.spec, memory=target.memory) as decode,
    ):
        source.write_late(NEW)
        first = prefill.record(stream=source.stream)
        made = prefill.offer("r", after=first, **ALL)
        numbers = [first]
        while not made.made.done():
            with source.cuda.on(0):
                delay(source.stream, SLOW_MS)
            numbers.append(prefill.record(stream=source.stream))
            with source.cuda.on(0), refused(NOT_READY):  # the loop is never idle
                source.cuda.cuStreamQuery(source.stream)
            await anyio.sleep(SLOW_MS / 2000)
        await decode.fetch(made.ticket, **ALL).ended
        await made.ended

    assert numbers == sorted(set(numbers))
    assert len(numbers) > 1
    assert target.content() == {NEW}
