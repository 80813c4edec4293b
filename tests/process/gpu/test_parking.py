"""Offers of engines on GPUs are parked in pinned host memory, and read from there."""

import os
from pathlib import Path

import pytest

from kvbus.engine import Outcome
from kvbus.memory.cuda import seen_gpus
from tests.process.gpu.fake import ON_FAKE
from tests.process.gpu.test_handoffs import SHAPES, on
from tests.process.handoffs.shapes import GROUP, STATE, WINDOW, ShapedAgents, Side, two_engines
from tests.support.agents import until
from tests.support.cuda import World
from tests.support.engines import hand_over

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

READERS = {"GPU": "cuda:0", "another GPU": "cuda:1", "host": "cpu"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", ["auto", "packed"])
async def test_every_byte_of_a_parked_offer_arrives(
    shapes: ShapedAgents, path: str, name: str, reader: str
) -> None:
    device = READERS[reader]
    if device == "cuda:1" and len(seen_gpus()) < 2:
        pytest.skip("no GPU for this test: it needs two")
    prefill, decode = SHAPES[name]
    sides = on(prefill, "cuda:0"), on(decode, device)
    async with two_engines(shapes, path, *sides, groups=(GROUP, WINDOW, STATE)) as pair:
        for num_tokens, first_token in ((71, 0), (71, 60), (13, 5)):
            await hand_over(*pair, num_tokens, first_token=first_token, parks=True)
    await until(lambda: not shapes.prefill.status()["pools"])


@pytest.mark.skipif(not ON_FAKE, reason="a card does not count its kernels")
async def test_the_gpu_copies_what_is_parked(shapes: ShapedAgents) -> None:
    world = World(Path(os.environ["FAKE_CUDA_WORLD"]))
    side = on(Side(), "cuda:0")
    async with two_engines(shapes, "auto", side, Side()) as (source, _):
        blocks = source.whole_blocks(3, 71)
        offer = await source.prefill.offer("parked", num_tokens=71, block_ids=blocks)
        before = world.num("kernels")
        await offer.park()
        assert await offer.ended is Outcome.PARKED
        assert world.num("kernels") > before
        offer.withdraw()
