"""An open offer is read while it grows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvLayout
from tests.process.handoffs.shapes import (
    GROUP,
    PATHS,
    STATE,
    WINDOW,
    ShapedAgents,
    Side,
    two_engines,
)
from tests.support.agents import until
from tests.support.engines import FETCH_TIMEOUT_S, Handoff, begin, failure_of
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

NUM_TOKENS = 71
HND = Memory(KvLayout.parse("HND"))
ALONE = Side(tp=2, block_size=24), Side(tp=3, memory=HND)
SPREAD = Side(tp=2, block_size=24, places="01"), Side(tp=3, memory=HND, places="010")


async def arrive(handoff: Handoff, num_ready: int) -> None:
    await handoff.grow(num_ready)
    wanted = handoff.target.views_of(handoff.wanted)
    size = handoff.target.spec.group("full").block_size
    first_token = handoff.asked["first_token"]
    tokens = range(first_token, num_ready)
    blocks = [handoff.ours["full"][token // size - first_token // size] for token in tokens]
    slots = [token % size for token in tokens]

    def has_arrived() -> bool:
        return all(
            torch.equal(view[blocks, slots], wanted[key][blocks, slots])
            for key, view in handoff.target.views().items()
            if key[1] in GROUP.layers
        )

    await until(has_arrived, FETCH_TIMEOUT_S)


@pytest.mark.parametrize(
    ("path", "sides", "groups"),
    [
        *(pytest.param(path, ALONE, (GROUP, WINDOW, STATE), id=path) for path in PATHS),
        pytest.param("packed", SPREAD, (GROUP,), id="packed, at several agents"),
    ],
)
async def test_chunks_arrive_in_open_offer_and_empty_seal_ends_fetch(
    shapes: ShapedAgents, path: str, sides: tuple[Side, Side], groups: Sequence[GroupSpec]
) -> None:
    async with two_engines(shapes, path, *sides, groups=groups) as engines:
        target = engines[1]
        before = target.snapshot()
        handoff = await begin(*engines, NUM_TOKENS, first_token=13, zero_tail=True, ready=0)
        for num_ready in (1, 24, 53, NUM_TOKENS):
            await arrive(handoff, num_ready)
        if STATE in groups:
            states = target.views()[0, 4, "conv"].clone()
            assert torch.equal(states, target.views_of(before)[0, 4, "conv"])
        await handoff.offer.seal()
        assert (await handoff.completed()).path == path


async def test_offer_opened_without_tables_gets_them_with_its_tokens(shapes: ShapedAgents) -> None:
    groups = (GROUP, WINDOW, STATE)
    async with two_engines(shapes, "direct", *ALONE, groups=groups) as (source, target):
        nothing: dict[str, Any] = {"num_tokens": 0, "block_ids": {}, "sealed": False}
        offer = await source.prefill.offer("r", **nothing)
        handoff = await begin(source, target, NUM_TOKENS, only_tails=True, offer=offer)
        firsts = source.first_blocks(NUM_TOKENS)
        await offer.extend(NUM_TOKENS, handoff.theirs, first_blocks=firsts)
        await offer.seal()
        await handoff.completed()


async def test_cancelled_fetch_leaves_growing_offer_to_another(shapes: ShapedAgents) -> None:
    async with two_engines(shapes, "packed", *ALONE) as engines:
        handoff = await begin(*engines, NUM_TOKENS, ready=0)
        await arrive(handoff, 30)
        await handoff.fetch.cancel()
        failure = await failure_of(handoff.fetch)
        await handoff.fetch.freed
        handoff.fetch_again()
        await arrive(handoff, NUM_TOKENS)
        await handoff.offer.seal()
        assert failure.code is ErrorCode.CANCELLED
        await handoff.completed()
