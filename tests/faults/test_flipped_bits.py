"""A bit that flips in real memory, between agents that are processes, after it was read."""

import signal
import uuid
from collections.abc import Iterator
from random import Random

import pytest
import torch

from kvbus.errors import ErrorCode
from tests.agents import Agents, agents_ended, until
from tests.engines import Engine, expected_after, failure_of, pair, same, works
from tests.examples import num_examples

pytestmark = pytest.mark.anyio

NUM_FLIPS = num_examples(40)
NUM_TOKENS = 90


@pytest.fixture(scope="module")
def shared() -> Iterator[Agents]:
    """Agents of one machine: a copy of mapped memory needs nothing of the prefill agent."""
    with agents_ended(Agents) as agents:
        reader = agents.prepare("decode", mapped=True, digest="full")
        reader.expected_trouble.add("digest.failed")
        agents.start(agents.prepare("prefill"), reader)
        yield agents


@pytest.fixture
def agents(shared: Agents) -> Iterator[Agents]:
    """They hold nothing after each test."""
    yield shared
    shared.check()


def bits_of(engine: Engine, blocks: list[int], random: Random) -> tuple[torch.Tensor, list[int]]:
    """One element of what the tokens have, and layer, head and token of it."""
    (rank, layer, part), view = random.choice(list(engine.views().items()))
    token, at = random.randrange(NUM_TOKENS), random.randrange(view.shape[2])
    head = engine.heads(rank, layer, part)[at]
    element = view[blocks[token // 16], token % 16, at, random.randrange(view.shape[3])]
    return element, [layer, head, token]


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_bit_that_flips_between_landing_and_digest_is_found_on_either_side(agents, side):
    """The prefill agent is stopped: the bytes land without it, the digests do not come."""
    decode, prefill = agents.all
    random = Random(side)
    async with pair(prefill.attach, decode.attach, tp=2) as (source, target):
        assert await works(source, target)
        for _ in range(NUM_FLIPS):
            theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
            target.fill(random.randrange(1000))
            landed = expected_after(
                target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS
            )
            offer = await source.prefill.offer(
                uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs
            )
            prefill.signal(signal.SIGSTOP)
            try:
                fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
                await until(lambda wanted=landed: same(target.snapshot(), wanted))
                engine, blocks = (source, theirs) if side == "source" else (target, ours)
                element, (layer, head, token) = bits_of(engine, blocks["full"], random)
                element ^= 1 << random.randrange(15)
            finally:
                prefill.signal(signal.SIGCONT)
            failed = await failure_of(fetch)
            await offer.withdraw()
            await offer.released()

            first = token // 16 * 16
            place = f"head {head}, tokens {first} to {min(first + 16, NUM_TOKENS)}; 1 of "
            assert failed.code is ErrorCode.DIGEST_MISMATCH
            assert f"layer {layer}, " in failed.message
            assert place in failed.message
        assert await works(source, target)

    assert len(decode.says("digest.failed")) >= NUM_FLIPS
