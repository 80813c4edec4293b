"""Engines with KV on a GPU hand over bit for bit: to each other, and from and to shared memory.

Each agent is a process of its own, so the memory is opened by two processes beside this one.
"""

from dataclasses import replace

import pytest

from kvbus.geometry import KvLayout
from tests.process.handoffs.shapes import GROUP, STATE, WINDOW, ShapedAgents, Side, two_engines
from tests.support.engines import hand_over
from tests.support.memories import Memory

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

HND = KvLayout.parse("HND")
PLACES = {
    "cuda to cuda": ("cuda:0", "cuda:0"),
    "cuda to shared": ("cuda:0", "cpu"),
    "shared to cuda": ("cpu", "cuda:0"),
}
SHAPES = {
    "equal": (Side(), Side()),
    "tp2-3": (Side(tp=2), Side(tp=3)),
    "tp1-2 NHD-HND": (Side(), Side(tp=2, memory=Memory(HND))),
    "pp2 block 48-32": (Side(pp=2, block_size=48), Side(block_size=32)),
    "padded-apart": (Side(memory=Memory(padding=2)), Side(memory=Memory(HND, apart=True))),
}


def on(side: Side, device: str) -> Side:
    """The side with its memory there."""
    return replace(side, memory=replace(side.memory, device=device))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", ["auto", "packed"])
async def test_every_byte_arrives(shapes: ShapedAgents, path: str, name: str, places: str) -> None:
    sides = [on(s, device) for s, device in zip(SHAPES[name], PLACES[places], strict=True)]
    async with two_engines(shapes, path, *sides, groups=(GROUP, WINDOW, STATE)) as pair:
        for num_tokens, first_token in ((71, 0), (71, 60), (13, 5), (71, 71)):
            fetched = await hand_over(
                *pair, num_tokens, first_token=first_token, zero_tail=first_token == 60
            )

            assert fetched.path in ("packed", "")


async def test_an_open_offer_is_read_while_it_grows(shapes: ShapedAgents) -> None:
    sides = on(Side(), "cuda:0"), on(Side(tp=2), "cuda:0")
    async with two_engines(shapes, "auto", *sides, max_tokens=130) as pair:
        await hand_over(*pair, 130, steps=(17, 64, 100))


async def test_many_tiles_pass_few_slots_and_log_says_where_slots_are(
    shapes: ShapedAgents,
) -> None:
    sides = on(Side(), "cuda:0"), on(Side(memory=Memory(HND)), "cuda:0")
    async with two_engines(shapes, "packed", *sides, max_tokens=20_000) as pair:
        await hand_over(*pair, 20_000)

    for agent in (shapes.prefill, shapes.decode["packed"]):
        (placed,) = agent.logged("staging.placed")
        assert placed["gpu"].startswith("GPU-")
        assert placed["memory"] in ("VRAM", "DRAM")
        assert max(placed["vram_bytes_per_s"], placed["pinned_bytes_per_s"]) > 0
