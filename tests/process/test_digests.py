"""What was read is compared with what the prefill engine has: a flipped bit fails the fetch."""

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import GroupSpec, KvLayout
from tests.agents import Agents, agents_ended, until
from tests.engines import LARGE, Engine, Snapshot, failure_of, same
from tests.examples import num_examples
from tests.expected import expected_after, positions
from tests.memories import Memory
from tests.process.conftest import SLOTS
from tests.process.shapes import (
    GROUP,
    LATENT,
    STATE,
    WINDOW,
    ShapedAgents,
    Side,
    hand_over,
    two_engines,
)
from tests.process.tap import TAPPED, Tap, tapped

pytestmark = pytest.mark.anyio

HND = Memory(KvLayout.parse("HND"))
SHAPES: dict[str, tuple[Side, Side, Sequence[GroupSpec]]] = {
    "all groups": (Side(tp=2), Side(tp=3, memory=HND), (GROUP, WINDOW, STATE)),
    "blocks": (Side(block_size=48, memory=HND), Side(block_size=5), (GROUP,)),
    "latent": (Side(tp=2), Side(tp=4), (LATENT,)),
    "long": (Side(), Side(), (LARGE,)),
}
NUM_FLIPS = num_examples(24)
"""For each path; `tests/memory/test_digest_pieces.py` flips thousands, in any memory."""
NUM_TOKENS = {"long": 64 * 256}
FEW_TOKENS = 71


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


@dataclass(frozen=True)
class Flip:
    """One bit of what one rank of the decode engine has been given."""

    rank: int
    layer: int
    part: str
    head: int
    token: int
    dim: int
    bit: int

    def apply(self, engine: Engine, blocks: Any, first_token: int, num_tokens: int) -> None:
        group = group_of(engine, self.layer)
        row, slot = divmod(self.token, group.block_size)
        first = positions(group, first_token, num_tokens)[0] // group.block_size
        heads = engine.heads(self.rank, self.layer, self.part)
        view = engine.views()[self.rank, self.layer, self.part]
        at = (blocks[group.name][row - first], slot, heads.index(self.head), self.dim)
        width = 8 * view.element_size()
        is_sign = view.dtype.is_signed and self.bit == width - 1
        view[at] = view[at] ^ ((1 << self.bit) - (1 << width) * is_sign)

    def is_named(self, message: str) -> bool:
        """Whether a failure names the piece of it."""
        named = re.search(
            r"^rank (\d+) has .* layer (\d+), '(\w+)', head (\d+), tokens (\d+) to (\d+); 1 of ",
            message,
        )
        assert named is not None, message
        rank, layer, part, head, start, stop = named.groups()
        is_there = int(start) <= self.token < int(stop) <= int(start) // 16 * 16 + 16
        piece = (int(rank), int(layer), part, int(head))
        return is_there and piece == (self.rank, self.layer, self.part, self.head)


def group_of(engine: Engine, layer: int) -> GroupSpec:
    (group,) = (group for group in engine.spec.groups if layer in group.layers)
    return group


def draw_flip(random: Random, engine: Engine, first_token: int, num_tokens: int) -> Flip:
    views = engine.views()
    rank, layer, part = random.choice(list(views))
    view = views[rank, layer, part]
    return Flip(
        rank=rank,
        layer=layer,
        part=part,
        head=random.choice(engine.heads(rank, layer, part)),
        token=random.choice(positions(group_of(engine, layer), first_token, num_tokens)),
        dim=random.randrange(view.shape[3]),
        bit=random.randrange(8 * view.element_size()),
    )


@dataclass
class Landed:
    """A handoff whose bytes have all landed, and are not compared yet."""

    offer: Any
    fetch: Any
    ours: dict[str, list[int]]


async def landed(
    site: Site, source: Engine, target: Engine, num_tokens: int, first_token: int = 0
) -> Landed:
    """Hand over as far as that: the digests of the prefill agent are kept back."""
    theirs, ours = (
        source.whole_blocks(5, num_tokens),
        target.some_blocks(6, num_tokens, first_token),
    )
    more: dict[str, Any] = {"num_tokens": num_tokens, "first_token": first_token}
    wanted: Snapshot = expected_after(target.snapshot(), source, theirs, target, ours, **more)
    site.tap.keep("digest", "answer")
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, block_ids=ours, timeout_s=120.0, **more)
    await until(lambda: fetch.notice is not None or same(target.memories(), wanted), 120.0)
    assert fetch.notice is None, fetch.notice
    return Landed(offer, fetch, ours)


async def compared(site: Site, handoff: Landed) -> FetchFailed | None:
    """How it ends once the digests are there."""
    site.tap.let_through()
    failure = None
    try:
        await handoff.fetch.completed()
    except FetchFailed as failed:
        failure = failed
        await handoff.offer.withdraw()
    await handoff.offer.released()
    return failure


@pytest.mark.parametrize(
    ("path", "name"),
    [("direct", "all groups"), ("direct", "long"), ("packed", "blocks"), ("packed", "latent")],
)
async def test_a_bit_that_is_flipped_after_landing_is_found_and_located(
    site: Site, path: str, name: str
) -> None:
    random, num_tokens = Random(f"{path} {name}"), NUM_TOKENS.get(name, FEW_TOKENS)
    *sides, groups = SHAPES[name]
    shape: dict[str, Any] = {"groups": groups, "max_tokens": num_tokens}
    async with two_engines(site.shapes, path, *sides, **shape) as (source, target):
        untouched = await compared(site, await landed(site, source, target, num_tokens))
        for _ in range(NUM_FLIPS if name != "long" else 1):
            first_token = random.randrange(num_tokens)
            handoff = await landed(site, source, target, num_tokens, first_token)
            flip = draw_flip(random, target, first_token, num_tokens)
            flip.apply(target, handoff.ours, first_token, num_tokens)
            failed = await compared(site, handoff)

            assert failed is not None, flip
            assert failed.code is ErrorCode.DIGEST_MISMATCH
            assert flip.is_named(failed.message), (flip, failed.message)
        assert untouched is None


async def test_of_a_sample_a_few_pieces_are_compared(site: Site) -> None:
    num_tokens = 400
    num_all = GROUP.num_kv_heads * 2 * 2 * num_tokens // 16
    async with two_engines(site.shapes, "mapped", Side(), Side(), max_tokens=num_tokens) as (
        source,
        target,
    ):
        before = site.num_pieces("mapped", "equal")
        assert await compared(site, await landed(site, source, target, num_tokens)) is None
        num_equal = site.num_pieces("mapped", "equal") - before
        handoff = await landed(site, source, target, num_tokens)
        for memory in target.memories().values():
            memory.bitwise_not_()
        failed = await compared(site, handoff)

    assert 0 < num_equal < num_all / 8
    assert failed is not None
    assert failed.code is ErrorCode.DIGEST_MISMATCH
    assert 0 < site.num_pieces("mapped", "different") < num_all / 8


def makes_none(answer: dict[str, Any]) -> None:
    """As an older agent."""
    answer["digests"] = False


def tells_too_few(answer: dict[str, Any]) -> None:
    answer["digests"] = answer["digests"][8:]


@pytest.mark.parametrize(
    ("op", "change", "code", "words"),
    [
        ("handshake", makes_none, ErrorCode.INCOMPATIBLE, "run a newer kvbus there"),
        ("digest", tells_too_few, ErrorCode.INVALID, r"told \d+ digests, \d+ pieces are compared"),
    ],
)
async def test_a_prefill_agent_that_does_not_tell_the_digests_proves_nothing(
    site: Site, op: str, change: Callable[[dict[str, Any]], None], code: ErrorCode, words: str
) -> None:
    site.tap.change(op, change)
    async with two_engines(site.shapes, "direct", Side(), Side()) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        failure = await failure_of(
            target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        )
        await offer.withdraw()

        assert failure.code is code
        assert re.search(words, failure.message)
        assert code is ErrorCode.INVALID or same(target.snapshot(), before), "nothing was read"


async def test_bytes_that_differ_as_the_offer_has_ended_are_no_mismatch(site: Site) -> None:
    """Its engine has other uses for the blocks then; nobody is told that KV arrives wrong."""
    async with two_engines(site.shapes, "direct", Side(), Side()) as (source, target):
        await hand_over(source, target, 16)
        before = site.num_pieces("direct", "different")
        handoff = await landed(site, source, target, 16)
        await handoff.offer.withdraw()
        await handoff.offer.released()
        Flip(0, 0, "k", 0, 3, 1, 4).apply(target, handoff.ours, 0, 16)
        site.tap.let_through()
        failure = await failure_of(handoff.fetch)

    assert failure.code is ErrorCode.OFFER_WITHDRAWN
    assert site.num_pieces("direct", "different") == before
