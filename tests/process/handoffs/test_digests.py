"""What was read is compared with what the prefill engine has: a flipped bit fails the fetch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import GroupSpec, KvLayout
from tests.process.handoffs.conftest import SLOTS
from tests.process.handoffs.shapes import GROUP, STATE, WINDOW, ShapedAgents, Side, two_engines
from tests.process.handoffs.tap import TAPPED, Tap, tapped
from tests.support.agents import Agents, agents_ended, until
from tests.support.engines import Engine, Handoff, begin, failure_of, hand_over
from tests.support.examples import num_examples
from tests.support.expected import positions
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

HND = Memory(KvLayout.parse("HND"))
NUM_TOKENS = 71
SHAPES: dict[str, tuple[Side, Side, Sequence[GroupSpec]]] = {
    "direct": (Side(tp=2), Side(tp=3, memory=HND), (GROUP, WINDOW, STATE)),
    "packed": (Side(block_size=48, memory=HND), Side(block_size=5), (GROUP,)),
}
"""By path."""
NUM_FLIPS = num_examples(24)
"""For each path; `tests/unit/data/test_digests.py` holds the digests of any memory to loops."""
PIECE = re.compile(
    r"^rank (\d+) has .* layer (\d+), '(\w+)', head (\d+), tokens (\d+) to (\d+); 1 of "
)


@dataclass(frozen=True)
class Site:
    """Decode agents that compare, by path, and a prefill agent with a tap at it."""

    agents: Agents
    shapes: ShapedAgents
    tap: Tap

    def num_pieces(self, path: str, outcome: str) -> float:
        """How many a decode agent has compared, with this outcome."""
        return self.shapes.decode[path].metric("digests_total", outcome=outcome)


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    """The agents of this file, ended with its last test."""
    with agents_ended(Agents) as agents:
        prefill = agents.prepare("prefill", **SLOTS, **TAPPED)
        decode = {
            path: agents.prepare(
                "decode", path=path, mapped=path == "mapped", digest=digest, **SLOTS
            )
            for path, digest in (("direct", "full"), ("packed", "full"), ("mapped", "sampled"))
        }
        for agent in decode.values():
            agent.expected_trouble.add("digest.failed")
        with tapped(prefill) as tap:
            agents.start(*agents.all)
            prefill.started["peer"] = prefill.settings["peer_bind"]
            yield Site(agents, ShapedAgents(prefill, decode), tap)


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The agents, which must hold nothing after each test."""
    yield shared_site
    shared_site.tap.let_through()
    shared_site.agents.check()


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
    """Where a head is, by rank: its number in a view, and that view."""
    return {
        place[0]: (engine.heads(*place).index(head), view)
        for place, view in engine.views().items()
        if place[1:] == (layer, part) and head in engine.heads(*place)
    }


def is_named(flipped: tuple[Any, ...], message: str) -> bool:
    """Whether a failure names the piece with that bit."""
    named = PIECE.search(message)
    assert named is not None, message
    rank, layer, part, head, start, stop = named.groups()
    ranks, *piece, token = flipped
    is_there = int(start) <= token < int(stop) <= int(start) // 16 * 16 + 16
    return is_there and int(rank) in ranks and piece == [int(layer), part, int(head)]


async def landed(
    site: Site, source: Engine, target: Engine, num_tokens: int, first_token: int = 0
) -> Handoff:
    """Hand over until all bytes have landed: the prefill agent is not asked for digests yet."""
    site.tap.keep("digest")
    handoff = await begin(source, target, num_tokens, first_token=first_token, timeout_s=120.0)
    await until(lambda: handoff.fetch.notice is not None or handoff.has_landed(), 120.0)
    assert handoff.fetch.notice is None, handoff.fetch.notice
    return handoff


async def compared(site: Site, handoff: Handoff) -> FetchFailed | None:
    """How it ends once it is asked for the digests."""
    site.tap.let_through()
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


async def test_prefill_agent_omitting_digests_proves_nothing(site: Site) -> None:
    site.tap.change("digest", lambda answer: answer.update(digests=answer["digests"][8:]))
    async with two_engines(site.shapes, "direct", Side(), Side()) as (source, target):
        handoff = await begin(source, target, 16)
        failure = await failure_of(handoff.fetch)
        await handoff.offer.withdraw()

        assert failure.code is ErrorCode.INVALID
        assert re.search(r"told \d+ digests, \d+ pieces are compared", failure.message)


async def test_bytes_that_differ_after_offer_end_are_no_mismatch(site: Site) -> None:
    """Its engine has other uses for the blocks then; nobody is told that KV arrives wrong."""
    async with two_engines(site.shapes, "direct", Side(), Side()) as engines:
        await hand_over(*engines, 16)
        before = site.num_pieces("direct", "different")
        handoff = await landed(site, *engines, 16)
        await handoff.offer.withdraw()
        await handoff.offer.ended
        flip(Random(0), handoff)
        site.tap.let_through()
        failure = await failure_of(handoff.fetch)

    assert failure.code is ErrorCode.OFFER_WITHDRAWN
    assert site.num_pieces("direct", "different") == before
