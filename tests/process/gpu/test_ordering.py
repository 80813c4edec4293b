"""What the agents copy comes after the GPU work that the engine recorded, and not before."""

import pytest
import torch

from kvbus.engine import KvCache, Link, RankMemory
from kvbus.geometry import GroupSpec, KvLayout, KvPart
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.engines import make_spec
from tests.support.strict_links import bits

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

GROUP = GroupSpec("full", (0, 1), 16, 8, 64, "bfloat16")
NUM_BLOCKS, NUM_TOKENS = 8, 64
BLOCKS = {"full": [6, 1, 3, 4]}
NHD = KvLayout.parse("NHD")
LONG_CYCLES = 2_000_000_000
"""About a second of a GPU."""


@pytest.mark.parametrize("turn", range(3))
async def test_late_writes_are_sent_and_late_zeros_spare_arrivals(
    shapes: ShapedAgents, turn: int
) -> None:
    specs = [make_spec(groups=(GROUP,)) for _ in range(2)]
    attach = shapes.prefill.attach, shapes.decode["auto"].attach
    streams = [torch.cuda.Stream() for _ in specs]  # type: ignore[no-untyped-call]  # of torch
    memories = [
        RankMemory.allocate(spec, 0, NHD, num_blocks=NUM_BLOCKS, device="cuda:0") for spec in specs
    ]
    source, target = (
        KvCache(spec, memory.rank, memory.tensor)
        for spec, memory in zip(specs, memories, strict=True)
    )
    async with (
        Link(attach[0], specs[0], memory=memories[0]) as prefill,
        Link(attach[1], specs[1], memory=memories[1]) as decode,
    ):
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]  # of torch
            for layer in GROUP.layers:
                for part in GROUP.parts:
                    bits(source.view(layer, part)).fill_(1000 + layer + turn)
            after = prefill.record()
        offering = prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=BLOCKS, after=after)
        with torch.cuda.stream(streams[1]):
            torch.cuda._sleep(2 * LONG_CYCLES)  # type: ignore[no-untyped-call]  # of torch
            for layer in GROUP.layers:
                for part in GROUP.parts:
                    bits(target.view(layer, part)).zero_()
            after = decode.record(stream=streams[1])
        still_busy = not streams[0].query() and not streams[1].query()
        offer = await offering
        fetch = decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS, after=after)
        await fetch.ended
        found = {
            layer: set(bits(target.view(layer, KvPart.VALUE))[BLOCKS["full"]].flatten().tolist())
            for layer in GROUP.layers
        }
        await offer.ended

    assert still_busy, "the GPU was done too soon for this test to say anything: raise LONG_CYCLES"
    assert found == {layer: {1000 + layer + turn} for layer in GROUP.layers}
