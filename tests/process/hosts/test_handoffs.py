"""Every bit arrives between agents on hosts of their own, whichever two they are."""

from contextlib import AsyncExitStack
from itertools import product

import anyio
import pytest

from kvbus.geometry import KvLayout
from tests.process.hosts.conftest import Network
from tests.support.engines import engine, hand_over, make_spec, pair, spread_engine
from tests.support.namespaces import BRIDGED

pytestmark = pytest.mark.anyio

NUM_TOKENS = 1000
TOKEN_BYTES = 2 * 2 * 6 * 8 * 2
"""Of both layers, K and V, all heads."""


async def test_all_pairs_of_hosts_hand_over_at_once(network: Network) -> None:
    async with AsyncExitStack() as stack:
        pairs = [
            await stack.enter_async_context(pair(prefill.attach, decode.attach))
            for prefill, decode in product(network.prefill, network.decode)
        ]
        before = [agent.metric("read_bytes_total") for agent in network.decode]

        async with anyio.create_task_group() as tasks:
            for engines in pairs:
                tasks.start_soon(hand_over, *engines)

        now = [agent.metric("read_bytes_total") for agent in network.decode]
        read = {there - at for there, at in zip(now, before, strict=True)}
        assert read == {40 * TOKEN_BYTES * len(network.prefill)}


async def test_a_prefill_agent_begins_no_connection_to_its_reader(network: Network) -> None:
    """What docs/security.md says of the ways that have to be open, of KV in blocks and in tiles."""
    prefill, decode, host = network.at["p0"], network.at["d0"], network.hosts["p0"]
    before = host.num_connects()
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        engine(decode.attach, layout=KvLayout.parse("HND"), seed=3) as other,
    ):
        paths = [(await hand_over(source, one, NUM_TOKENS)).path for one in (target, other)]
    after = host.num_connects()
    open_at_home = host.ports_open_at(host.address, [7701])

    assert paths == ["direct", "packed"]
    assert after == before
    assert open_at_home
    assert host.num_connects() > after, "connections are counted"


@pytest.mark.long
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (["p0", "p1"], ["d0", "d1", "d2"]),
        (["p1", "p0", "p0"], ["d2", "d0"]),
    ],
    ids="+".join,
)
async def test_an_engine_of_which_the_ranks_are_on_several_hosts(
    network: Network, prefill: list[str], decode: list[str]
) -> None:
    theirs, ours = ([network.at[name] for name in names] for names in (prefill, decode))
    spec = make_spec(tp=len(decode))
    async with (
        spread_engine(theirs, seed=1) as source,
        spread_engine(ours, spec, seed=2) as target,
    ):
        before = {name: received(network, name) for name in decode}

        await hand_over(source, target, NUM_TOKENS)

        share = NUM_TOKENS * TOKEN_BYTES // len(decode)
        for name, at in before.items():
            assert received(network, name) - at >= share * decode.count(name)


def received(network: Network, name: str) -> int:
    """What has come to a host over the network."""
    return network.hosts[name].received_bytes(BRIDGED)
