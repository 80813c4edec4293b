"""Every bit arrives between agents on hosts of their own, whichever two they are."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.protocol import Outcome
from tests.engines import Engine, engine, make_spec, same, works
from tests.expected import expected_after
from tests.hosts.conftest import Network
from tests.memories import NHD
from tests.namespaces import BRIDGED
from tests.process.spread_engines import spread_engine

pytestmark = pytest.mark.anyio

NUM_TOKENS, BLOCKS_EACH = 40, 3
NUM_LARGE = 1000
TOKEN_BYTES = 2 * 2 * 6 * 8 * 2
"""Of both layers, K and V, all heads."""


async def test_all_pairs_of_hosts_hand_over_at_once(network: Network) -> None:
    async with AsyncExitStack() as stack:
        sources = [
            await stack.enter_async_context(engine(PrefillSession, agent.attach, seed=1 + number))
            for number, agent in enumerate(network.prefill)
        ]
        targets = [
            await stack.enter_async_context(engine(DecodeSession, agent.attach, seed=9 + number))
            for number, agent in enumerate(network.decode)
        ]
        before = [agent.metric("read_bytes_total") for agent in network.decode]

        await hand_over_all(sources, targets)

        read = [
            agent.metric("read_bytes_total") - at
            for agent, at in zip(network.decode, before, strict=True)
        ]
        assert len(set(read)) == 1
        assert read[0] > 0


async def hand_over_all(sources: Sequence[Engine], targets: Sequence[Engine]) -> None:
    """One handoff of each source with each target, all at once, in blocks of their own."""
    theirs = [blocks_of(number) for number in range(len(targets))]
    ours = [blocks_of(number) for number in range(len(sources))]
    expected = [target.snapshot() for target in targets]
    for of, source in enumerate(sources):
        for to, target in enumerate(targets):
            expected[to] = expected_after(
                expected[to], source, theirs[to], target, ours[of], num_tokens=NUM_TOKENS
            )

    async def one(of: int, to: int) -> None:
        offer = await sources[of].prefill.offer(
            f"{of}-{to}", num_tokens=NUM_TOKENS, block_ids=theirs[to]
        )
        fetch = targets[to].decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours[of])
        await fetch.completed()
        assert await offer.released() is Outcome.COMPLETED

    async with anyio.create_task_group() as tasks:
        for of in range(len(sources)):
            for to in range(len(targets)):
                tasks.start_soon(one, of, to)
    for target, wanted in zip(targets, expected, strict=True):
        assert same(target.snapshot(), wanted)


def blocks_of(number: int) -> dict[str, list[int]]:
    """Blocks that no other number has, not in order."""
    first = BLOCKS_EACH * number
    return {"full": list(range(first, first + BLOCKS_EACH))[::-1]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (["p0", "p1"], ["d0"]),
        (["p0"], ["d0", "d1"]),
        (["p0", "p1"], ["d0", "d1", "d2"]),
        (["p1", "p0", "p0"], ["d2", "d0"]),
    ],
    ids="+".join,
)
async def test_an_engine_of_which_the_ranks_are_on_several_hosts(
    network: Network, prefill: list[str], decode: list[str]
) -> None:
    async with (
        spread_engine(
            PrefillSession,
            [network.at[name] for name in prefill],
            make_spec(tp=len(prefill)),
            layout=NHD,
            seed=1,
        ) as source,
        spread_engine(
            DecodeSession, [network.at[name] for name in decode], make_spec(tp=len(decode)), seed=2
        ) as target,
    ):
        before = {name: received(network, name) for name in decode}

        assert await works(source, target, NUM_LARGE)

        share = NUM_LARGE * TOKEN_BYTES // len(decode)
        for name, at in before.items():
            assert received(network, name) - at >= share * decode.count(name)


def received(network: Network, name: str) -> int:
    """What has come to a host over the network."""
    return network.hosts[name].received_bytes(BRIDGED)
