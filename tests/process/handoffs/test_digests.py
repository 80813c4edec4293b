"""Digests of both sides are compared: a flipped bit fails the fetch."""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import GroupSpec, KvLayout
from kvbus.protocol import Digests
from tests.process.handoffs.conftest import SLOTS
from tests.process.handoffs.shapes import GROUP, STATE, WINDOW, ShapedAgents, Side, two_engines
from tests.support.agents import Agents, agents_ended, until
from tests.support.engines import Engine, Handoff, begin, failure_of, hand_over
from tests.support.examples import num_examples
from tests.support.expected import positions
from tests.support.late_links import LINKED, LateLink, late_link, look_past_link
from tests.support.memories import Memory
from tests.unit.decode.neighbours import neighbours

pytestmark = pytest.mark.anyio

HND = Memory(KvLayout.parse("HND"))
NUM_TOKENS = 71
SHAPES: dict[str, tuple[Side, Side, Sequence[GroupSpec]]] = {
    "direct": (Side(tp=2), Side(tp=3, memory=HND), (GROUP, WINDOW, STATE)),
    "packed": (Side(block_size=48, memory=HND), Side(block_size=5), (GROUP,)),
}
"""By path."""
DIGESTS = {"direct": "full", "packed": "full", "mapped": "sampled"}
NUM_FLIPS = num_examples(24)
"""For each path; `tests/unit/data/test_digests.py` holds the digests of any memory to loops."""
PIECE = re.compile(
    r"^rank (\d+) has .* layer (\d+), '(\w+)', head (\d+), tokens (\d+) to (\d+); 1 of "
)


@dataclass(frozen=True)
class Site:
    """Decode agents that compare, by path, and a prefill agent behind a link."""

    shapes: ShapedAgents
    link: LateLink

    def num_pieces(self, path: str, outcome: str) -> float:
        return self.shapes.decode[path].metric("digests_total", outcome=outcome)


@pytest.fixture(scope="module")
def shared() -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        agents.prepare("prefill", **SLOTS, **LINKED)
        for path, digest in DIGESTS.items():
            agent = agents.prepare(
                "decode", path=path, mapped=path == "mapped", digest=digest, **SLOTS
            )
            agent.expected_trouble.add("digest.failed")
        agents.start(*agents.all)
        look_past_link(agents.all[0])
        yield agents


@pytest.fixture
async def site(agents: Agents) -> AsyncIterator[Site]:
    prefill, *decode = agents.all
    shapes = ShapedAgents(prefill, dict(zip(DIGESTS, decode, strict=True)))
    async with late_link(prefill) as link:
        yield Site(shapes, link)


def flip(random: Random, handoff: Handoff) -> tuple[Any, ...]:
    """Flip one bit that the decode engine was given, where the prefill engine has it.

    Returns the decode engine's ranks that have it; its layer, part, head and token.
    """
    source, target, asked = handoff.source, handoff.target, handoff.asked
    _, layer, part = place = random.choice(list(target.views()))
    (group,) = (group for group in source.spec.groups if layer in group.layers)
    head = random.choice(target.heads(*place))
    token = random.choice(positions(group, asked["first_token"], asked["num_tokens"]))
    row, slot = divmod(token, group.block_size)
    at, bit = random.random(), 1 << random.randrange(8)
    for held, view in holders(source, layer, part, head).values():
        number = view[handoff.theirs[group.name][row], slot, held].view(torch.uint8)
        number[int(at * len(number))] ^= bit
    return set(holders(target, layer, part, head)), layer, part, head, token


def holders(engine: Engine, layer: int, part: str, head: int) -> dict[int, tuple[int, Any]]:
    return {
        place[0]: (engine.heads(*place).index(head), view)
        for place, view in engine.views().items()
        if place[1:] == (layer, part) and head in engine.heads(*place)
    }


def is_named(flipped: tuple[Any, ...], message: str) -> bool:
    named = PIECE.search(message)
    assert named is not None, message
    rank, layer, part, head, start, stop = named.groups()
    ranks, *piece, token = flipped
    is_there = int(start) <= token < int(stop) <= int(start) // 16 * 16 + 16
    return is_there and int(rank) in ranks and piece == [int(layer), part, int(head)]


async def landed(
    site: Site, source: Engine, target: Engine, num_tokens: int, first_token: int = 0
) -> Handoff:
    site.link.late = "digest"
    handoff = await begin(source, target, num_tokens, first_token=first_token, timeout_s=120.0)
    await until(lambda: handoff.fetch.notice is not None or handoff.has_landed(), 120.0)
    assert handoff.fetch.notice is None, handoff.fetch.notice
    return handoff


async def compared(site: Site, handoff: Handoff) -> FetchFailed | None:
    site.link.heal()
    failure = None
    try:
        await handoff.fetch.ended
    except FetchFailed as failed:
        failure = failed
        await handoff.offer.withdraw()
    await handoff.offer.ended
    return failure


@pytest.mark.parametrize("path", SHAPES)
async def test_flipped_bit_is_found_and_located(site: Site, path: str) -> None:
    random = Random(path)
    *sides, groups = SHAPES[path]
    async with two_engines(site.shapes, path, *sides, groups=groups) as engines:
        assert await compared(site, await landed(site, *engines, NUM_TOKENS)) is None
        for _ in range(NUM_FLIPS):
            first = random.randrange(NUM_TOKENS)
            handoff = await landed(site, *engines, NUM_TOKENS, first)
            flipped = flip(random, handoff)
            failed = await compared(site, handoff)
            assert failed is not None, flipped
            assert failed.code is ErrorCode.DIGEST_MISMATCH
            assert is_named(flipped, failed.message), (flipped, failed.message)


async def test_of_a_sample_a_few_pieces_are_compared(site: Site) -> None:
    num_tokens = 8000
    num_all = GROUP.num_kv_heads * 2 * 2 * num_tokens // 16
    async with two_engines(site.shapes, "mapped", Side(), Side(), max_tokens=num_tokens) as engines:
        before = site.num_pieces("mapped", "equal")
        assert await compared(site, await landed(site, *engines, num_tokens)) is None
        num_equal = site.num_pieces("mapped", "equal") - before
        handoff = await landed(site, *engines, num_tokens)
        for memory in handoff.source.memories().values():
            memory.bitwise_not_()
        failed = await compared(site, handoff)
    assert 0 < num_equal < num_all / 8
    assert failed is not None
    assert failed.code is ErrorCode.DIGEST_MISMATCH
    assert 0 < site.num_pieces("mapped", "different") < num_all / 8


async def test_prefill_agent_omitting_digests_proves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def omit(digests: bytes) -> Digests:
        return Digests(digests=digests[8:])

    monkeypatch.setattr("kvbus_prefill.gather.Digests", omit)
    async with (
        neighbours(folder, decode={"digest": "full"}) as agents,
        agents.engines() as (source, target),
    ):
        handoff = await begin(source, target, 16)
        failure = await failure_of(handoff.fetch)
        await handoff.offer.withdraw()
    assert failure.code is ErrorCode.INVALID
    assert re.search(r"sent \d+ digests for \d+ blocks", failure.message)


async def test_bytes_that_differ_after_offer_end_are_no_mismatch(site: Site) -> None:
    async with two_engines(site.shapes, "direct", Side(), Side()) as engines:
        await hand_over(*engines, 16)
        before = site.num_pieces("direct", "different")
        handoff = await landed(site, *engines, 16)
        await handoff.offer.withdraw()
        await handoff.offer.ended
        flip(Random(0), handoff)
        site.link.heal()
        failure = await failure_of(handoff.fetch)
    assert failure.code is ErrorCode.OFFER_WITHDRAWN
    assert site.num_pieces("direct", "different") == before
