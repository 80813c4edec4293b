"""An engine gives its GPU memory back while it sleeps, and has other memory at the same address."""

import os
from functools import partial
from pathlib import Path

import anyio
import pytest

from kvbus.engine import Link, Offer, RankMemory
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import GroupSpec, KvLayout, lay_out_rank
from kvbus.memory.cuda import GpuMemory, read_bytes
from tests.support.agents import Agents, until, wait_until
from tests.support.cuda import World, fake_cuda_env
from tests.support.cuda.apart import DRIVERS, run_together
from tests.support.cuda.calls import PAGE, Cuda
from tests.support.engines import make_spec

GROUP = GroupSpec("full", (0, 1), 16, 2, 64, "bfloat16")
LAYOUT = KvLayout.parse("NHD", cross_layer=True)
BLOCKS, NUM_TOKENS, NUM_BLOCKS = {"full": [255, 0, 7, 130]}, 64, 256
NUM_PARTS = 2
SIZE_BYTES = NUM_PARTS * PAGE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver", DRIVERS)
def test_memory_after_a_sleep_is_read_and_that_before_is_free(
    fresh: Agents, tmp_path: Path, driver: str
) -> None:
    env = dict(os.environ)
    if driver == "fake":
        env = fake_cuda_env(world=World(tmp_path / "world"))
    prefill, decode = fresh.both(decode={"mapped": True}, env=env)
    sockets = {"PREFILL": str(prefill.attach), "DECODE": str(decode.attach)}

    run_together([sleep_and_wake], driver, env | sockets)

    assert len(prefill.logged("engine.detached")) == 2
    # The fake driver does not count descriptors as references to memory, as CUDA does.
    agents = prefill, decode
    wait_until(lambda: not any(one.num_files("fake-vram") for one in agents), "they are closed")
    fresh.check()


def sleep_and_wake(cuda: Cuda) -> None:
    cuda.start()
    anyio.run(serve, Engine(cuda))


async def serve(engine: "Engine") -> None:
    async with engine.reader:
        engine.wake(content=1)
        async with engine.link() as link:
            assert await engine.hand_over(link) == {1}
            unread = await engine.offer(link)
            free_bytes = engine.cuda.free_bytes()
        with pytest.raises(KVBusError):
            await unread.ended
        engine.sleep()
        await until(lambda: engine.cuda.free_bytes() == free_bytes + SIZE_BYTES)

        engine.wake(content=2)
        async with engine.link() as link:
            with pytest.raises(FetchFailed):
                await engine.fetched(unread)
            assert await engine.hand_over(link) == {2}


class Engine:
    """A prefill engine in memory of cuMemCreate, and a decode engine."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self._address = cuda, cuda.reserve(SIZE_BYTES)
        self._spec, target = (make_spec(groups=(GROUP,)) for _ in range(2))
        self._target = RankMemory.allocate(
            target, 0, LAYOUT, num_blocks=NUM_BLOCKS, device="cuda:0"
        )
        self.reader = Link(os.environ["DECODE"], target, memory=self._target)

    def wake(self, *, content: int) -> None:
        for at in range(self._address, self._address + SIZE_BYTES, PAGE):
            handle = self.cuda.create(PAGE)
            self.cuda.map(at, PAGE, handle)
            self.cuda.cuMemRelease(handle)
        self.cuda.set_access(self._address, SIZE_BYTES)
        self.cuda.write(self._address, bytes([content]) * SIZE_BYTES)

    def sleep(self) -> None:
        for at in range(self._address, self._address + SIZE_BYTES, PAGE):
            self.cuda.cuMemUnmap(at, PAGE)

    def link(self) -> Link:
        rank = lay_out_rank(self._spec, 0, LAYOUT, num_blocks=NUM_BLOCKS)
        (segment,) = rank.segments
        assert segment.size_bytes == SIZE_BYTES
        memory = GpuMemory(0, self._address, SIZE_BYTES)
        storages = {segment.segment_id: memory}
        return Link(os.environ["PREFILL"], self._spec, memory=RankMemory(rank, storages))

    async def offer(self, link: Link) -> Offer:
        return await link.offer("r", num_tokens=NUM_TOKENS, block_ids=BLOCKS)

    async def hand_over(self, link: Link) -> set[int]:
        """Return the bytes that the decode engine has in the blocks."""
        offer = await self.offer(link)
        assert await self.fetched(offer) == "mapped"
        await offer.ended
        (storage,) = self._target.storages.values()
        size_bytes = SIZE_BYTES // NUM_BLOCKS
        read = partial(read_bytes, 0, size_bytes=size_bytes)
        blocks = (storage.address + block * size_bytes for block in BLOCKS["full"])
        return {byte for address in blocks for byte in read(address)}

    async def fetched(self, offer: Offer) -> str:
        """Return the path."""
        fetch = self.reader.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS)
        return (await fetch.ended).path
