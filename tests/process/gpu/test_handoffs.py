"""Engines with KV on GPUs hand over bit for bit: to each other, and from and to shared memory.

Each agent is a process of its own, so the memory is opened by two processes beside this one.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvbus.engine import KvCache, Link, RankMemory
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart, lay_out_rank
from kvbus.memory.cuda import GpuMemory, seen_gpus
from tests.process.gpu.fake import tensor_at
from tests.process.handoffs.shapes import GROUP, STATE, WINDOW, ShapedAgents, Side, two_engines
from tests.support.cuda.calls import PAGE, Cuda
from tests.support.engines import hand_over, make_spec
from tests.support.memories import Memory
from tests.support.strict_links import bits

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

HND = KvLayout.parse("HND")
PLACES = {
    "one GPU": ("cuda:0", "cuda:0"),
    "two GPUs": ("cuda:0", "cuda:1"),
    "GPU to host": ("cuda:0", "cpu"),
    "host to GPU": ("cpu", "cuda:0"),
}
WAYS = [
    ("auto", "one GPU"),
    ("auto", "two GPUs"),
    ("packed", "one GPU"),
    ("auto", "GPU to host"),
    ("auto", "host to GPU"),
]
SHAPES = {
    "equal": (Side(), Side()),
    "tp2-3": (Side(tp=2), Side(tp=3)),
    "tp1-2 NHD-HND": (Side(), Side(tp=2, memory=Memory(HND))),
    "pp2 block 48-32": (Side(pp=2, block_size=48), Side(block_size=32)),
}
APART = Side(memory=Memory(padding=2)), Side(memory=Memory(HND, apart=True))


PARTED = GroupSpec("parted", (0,), 64, 8, 64, "float16")
NUM_PARTED_BLOCKS = 1100
OFFSET_BYTES = 4096


def memory_within(
    spec: EngineSpec, layout: KvLayout, *, parted: bool
) -> tuple[RankMemory, torch.Tensor]:
    """Memory within an allocation, or within more parts than a message has (cuMemCreate)."""
    rank = lay_out_rank(spec, 0, layout, num_blocks=NUM_PARTED_BLOCKS)
    (segment,) = rank.segments
    driver, num_parts = Cuda(), -(-(segment.size_bytes + OFFSET_BYTES) // PAGE)
    assert num_parts > 64
    with driver.on(0):
        first = driver.reserve(num_parts * PAGE) if parted else driver.alloc(num_parts * PAGE)
        for at in range(first, first + num_parts * PAGE, PAGE) if parted else ():
            driver.map(at, PAGE, driver.create(PAGE))
            driver.set_access(at, PAGE)
    memory = GpuMemory(0, first + OFFSET_BYTES, segment.size_bytes)
    tensor = tensor_at(memory.address, memory.size_bytes)
    return RankMemory(rank, {segment.segment_id: memory}), tensor


def on(side: Side, device: str) -> Side:
    """The side with its memory there."""
    return replace(side, memory=replace(side.memory, device=device))


async def check(shapes: ShapedAgents, path: str, sides: Sequence[Side], places: str) -> None:
    devices = PLACES[places]
    if "cuda:1" in devices and len(seen_gpus()) < 2:
        pytest.skip("no GPU for this test: it needs two")
    prefill, decode = (on(side, device) for side, device in zip(sides, devices, strict=True))
    is_mapped = path == "auto" and "cpu" not in devices
    async with two_engines(shapes, path, prefill, decode, groups=(GROUP, WINDOW, STATE)) as pair:
        for num_tokens, first_token in ((71, 0), (71, 60), (13, 5), (71, 71)):
            fetched = await hand_over(
                *pair, num_tokens, first_token=first_token, zero_tail=first_token == 60
            )

            assert fetched.path in ("mapped" if is_mapped else "packed", "")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("path", "places"), WAYS)
async def test_every_byte_arrives(shapes: ShapedAgents, path: str, name: str, places: str) -> None:
    await check(shapes, path, SHAPES[name], places)


@pytest.mark.needs_torch_cuda
@pytest.mark.parametrize(("path", "places"), WAYS)
async def test_tensors_of_torch_arrive(shapes: ShapedAgents, path: str, places: str) -> None:
    await check(shapes, path, APART, places)


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
        placed = agent.logged("staging.placed")[0]
        assert placed["gpu"].startswith(("GPU-", "MIG-"))
        assert placed["memory"] in ("VRAM", "DRAM")


# A segment of 64 descriptors or more comes in several messages, to the agents and between them.
@pytest.mark.parametrize("path", ["auto", "packed"])
@pytest.mark.parametrize("parted", [True, False])
async def test_memory_within_an_allocation_or_in_parts_arrives(
    shapes: ShapedAgents, path: str, parted: bool
) -> None:
    spec, num_tokens = make_spec(groups=(PARTED,)), 200
    layouts = KvLayout.parse("NHD"), HND
    memory = [memory_within(spec, layout, parted=parted) for layout in layouts]
    caches = [KvCache(spec, one.rank, tensor) for one, tensor in memory]
    bits(caches[0].view(0, KvPart.KEY)).random_()
    bits(caches[0].view(0, KvPart.VALUE)).random_()
    agents = shapes.prefill, shapes.decode[path]
    prefill, decode = (
        Link(agent.attach, spec, memory=one) for agent, (one, _) in zip(agents, memory, strict=True)
    )
    blocks = [[3, 900, 5, 1], [7, 2, 800, 4]]
    async with prefill, decode:
        offer = await prefill.offer("r", num_tokens=num_tokens, block_ids={"parted": blocks[0]})
        fetch = decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids={"parted": blocks[1]})
        fetched = await fetch.ended
        await offer.ended

    assert fetched.path == ("mapped" if path == "auto" else "packed")
    for part in PARTED.parts:
        sent, arrived = (
            bits(cache.view(0, part))[ids].flatten(0, 1)[:num_tokens]
            for cache, ids in zip(caches, blocks, strict=True)
        )
        assert torch.equal(sent, arrived)
