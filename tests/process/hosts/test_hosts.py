"""Hosts of a network: every bit arrives between any two, and cables and interfaces fail."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import product

import anyio
import pytest

from kvbus.geometry import KvLayout
from tests.process.faults.conftest import ENDS_OF_CUT, completes, end_offer, works_again
from tests.process.hosts.conftest import DECODE_HOSTS, PREFILL_HOSTS, Network
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    begin,
    engine,
    failure_of,
    hand_over,
    make_spec,
    pair,
    same,
    spread_engine,
    start_long_read,
    works,
)
from tests.support.namespaces import BRIDGED, Host

pytestmark = pytest.mark.anyio

NUM_TOKENS = 1000
TOKEN_BYTES = 2 * 2 * 6 * 8 * 2
"""Both layers, K and V, all heads."""


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
    """docs/security.md names the connections that a firewall has to permit."""
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
    [(["p0", "p1"], ["d0", "d1", "d0"]), (["p1", "p0", "p0"], ["d1", "d0"])],
    ids="+".join,
)
async def test_an_engine_of_which_the_ranks_are_on_several_hosts(
    network: Network, prefill: list[str], decode: list[str]
) -> None:
    theirs, ours = ([network.at[name] for name in names] for names in (prefill, decode))
    spec = make_spec(tp=len(decode))
    async with spread_engine(theirs, seed=1) as source, spread_engine(ours, spec, seed=2) as target:
        before = {name: received(network, name) for name in decode}
        await hand_over(source, target, NUM_TOKENS)
        share = NUM_TOKENS * TOKEN_BYTES // len(decode)
        for name, at in before.items():
            assert received(network, name) - at >= share * decode.count(name)


def received(network: Network, name: str) -> int:
    return network.hosts[name].received_bytes(BRIDGED)


NUM_FLAPS, CUT_S = 12, 5.0


def nothing_held_back(agent: AgentProcess) -> bool:
    return not agent.metric("quarantined_blocks") and not agent.metric("data_jobs")


@pytest.mark.parametrize(
    ("name", "set_link"),
    [
        pytest.param("p0", Host.set_cable, id="cable of the holder"),
        pytest.param(
            "p0", Host.set_interface, id="interface of the holder", marks=pytest.mark.long
        ),
        pytest.param("d0", Host.set_cable, id="cable of the reader", marks=pytest.mark.long),
    ],
)
async def test_a_host_is_cut_off_during_a_read(
    network: Network, name: str, set_link: Callable[[Host, str], None]
) -> None:
    host = network.hosts[name]
    at = {name: agent.attach for name, agent in network.at.items()}
    async with (
        pair(at["p0"], at["d0"], groups=(LARGE,), num_blocks=NUM_LARGE_BLOCKS) as (source, target),
        pair(at["p1"], at["d1"]) as elsewhere,
    ):
        offer, fetch = await start_long_read(source, target, timeout_s=CUT_S)
        network.at[name].peers_may_abort = True
        set_link(host, "down")
        try:
            failure = await failure_of(fetch)
            await fetch.freed
            elsewhere_works = await works(*elsewhere)
        finally:
            set_link(host, "up")
        freed = target.snapshot()
        await end_offer(offer)
        ends_as_freed = same(target.snapshot(), freed)
        await works_again(source, target)
        await until(lambda: all(map(nothing_held_back, network.decode)))
        assert failure.code in ENDS_OF_CUT
        assert elsewhere_works
        assert ends_as_freed


async def test_idle_connection_reset_fails_no_fetch(network: Network) -> None:
    async with pair(network.at["p0"].attach, network.at["d0"].attach) as (source, target):
        assert await works(source, target)
        network.at["d0"].peers_may_abort = True
        if not network.hosts["d0"].reset_connections(kept_ports=range(7701, 7704)):
            pytest.skip("the kernel resets no connections")
        handoff = await begin(source, target)
        await handoff.completed()


@pytest.mark.long
async def test_loose_cable_corrupts_no_bit_and_all_pairs_recover(network: Network) -> None:
    async with AsyncExitStack() as stack:
        pairs = [
            await stack.enter_async_context(pair(network.at[of].attach, network.at[to].attach))
            for of, to in product(PREFILL_HOSTS, DECODE_HOSTS)
        ]
        loose, ended, flapped = network.hosts["p0"], list[bool](), anyio.Event()
        network.at["p0"].peers_may_abort = True

        async def keep_handing_over(source: Engine, target: Engine) -> None:
            while not flapped.is_set():
                ended.append(await completes(source, target))

        async with anyio.create_task_group() as tasks:
            for engines in pairs:
                tasks.start_soon(keep_handing_over, *engines)
            try:
                for number in range(NUM_FLAPS):  # what a loose cable does takes time
                    loose.set_cable("down" if number % 2 == 0 else "up")
                    await anyio.sleep(0.1 + 0.05 * number)
            finally:
                loose.set_cable("up")
                flapped.set()
        async with anyio.create_task_group() as tasks:
            for engines in pairs:
                tasks.start_soon(works_again, *engines)
        assert any(ended)
        await until(lambda: all(map(nothing_held_back, network.decode)))
