"""Cables pulled, interfaces off, hosts frozen: all ends in time, and works once they are back."""

import signal
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed, RequestRefused
from kvbus.protocol import Outcome
from kvbus_decode.read.recycling import AGAIN_S
from tests.agents import AgentProcess, until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    engine,
    failure_of,
    make_spec,
    same,
    start_long_read,
    works,
)
from tests.expected import expected_after
from tests.hosts.conftest import Network
from tests.namespaces import Host

pytestmark = pytest.mark.anyio

NUM_TOKENS = 40
WORKS_WITHIN_S = 30.0
"""After a fault; a second or two where cores are free."""
FROZEN_S = 15.0
NUM_FLAPS = 12
ENDS_OF_CUT = (
    ErrorCode.TIMEOUT,
    ErrorCode.LEASE_EXPIRED,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.PEER_UNREACHABLE,
)


@asynccontextmanager
async def long_pair(network: Network, prefill: str, decode: str) -> Any:
    """Engines of two hosts, for `start_long_read`."""
    shape: dict[str, Any] = {"num_blocks": NUM_LARGE_BLOCKS}
    specs = [make_spec(groups=(LARGE,)) for _ in range(2)]
    async with (
        engine(PrefillSession, network.at[prefill].attach, specs[0], seed=1, **shape) as source,
        engine(DecodeSession, network.at[decode].attach, specs[1], seed=2, **shape) as target,
    ):
        yield source, target


async def try_handoff(source: Engine, target: Engine) -> bool:
    """Whether one handoff completed, with every bit right; a fetch that failed changed no more."""
    theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
    wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=10.0)
    try:
        await fetch.completed()
    except FetchFailed as failure:
        if failure.code not in ENDS_OF_CUT:
            raise
        await fetch.blocks_freed()
        await end_offer(offer)
        return False
    assert same(target.snapshot(), wanted)
    assert await offer.released() is Outcome.COMPLETED
    return True


async def end_offer(offer: Offer) -> None:
    """Withdraw it, unless it has ended."""
    with suppress(RequestRefused):
        await offer.withdraw()
    await offer.released()


async def works_again(source: Engine, target: Engine) -> None:
    """A handoff completes soon; the first tries may find out about the fault."""
    deadline = time.monotonic() + WORKS_WITHIN_S
    while not await try_handoff(source, target):
        assert time.monotonic() < deadline


def nothing_held_back(agent: AgentProcess) -> bool:
    """Whether no block is in quarantine, and no transfer outstanding."""
    return not agent.metric("quarantined_blocks") and not agent.metric("outstanding_handles")


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
    host, reader_agent = network.hosts[name], network.at["d0"]
    async with (
        long_pair(network, "p0", "d0") as (source, target),
        long_pair(network, "p1", "d1") as (elsewhere, reader),
    ):
        offer, fetch = await start_long_read(source, target)
        set_link(host, "down")
        try:
            failure = await failure_of(fetch)
            if name == "p0":
                await fetch.blocks_freed()
            else:  # without a link of its own the agent cannot make NIXL anew, and goes on trying
                reader_agent.says("transport.unlinked")
                await anyio.sleep(2.5 * AGAIN_S)  # in which it tries again, and says nothing
            elsewhere_works = await works(elsewhere, reader)
        finally:
            set_link(host, "up")
        await fetch.blocks_freed()
        freed = target.snapshot()
        await end_offer(offer)

        assert (failure.stage, failure.code in ENDS_OF_CUT) == ("reading", True)
        assert elsewhere_works
        assert same(target.snapshot(), freed)
        await works_again(source, target)
        await until(lambda: nothing_held_back(reader_agent))
        if name == "d0":
            reader_agent.says("transport.linked")
        unlinked, linked = map(reader_agent.logged, ("transport.unlinked", "transport.linked"))
        assert len(unlinked) == len(linked) == (name == "d0"), "said once each"


@pytest.mark.long
async def test_a_cable_that_is_loose_costs_no_wrong_bit_and_all_pairs_work_after_it(
    network: Network,
) -> None:
    pairs = [(of, to) for of in ("p0", "p1") for to in ("d0", "d1", "d2")]
    async with AsyncExitStack() as stack:
        engines = [
            (
                await stack.enter_async_context(
                    engine(PrefillSession, network.at[of].attach, seed=1)
                ),
                await stack.enter_async_context(
                    engine(DecodeSession, network.at[to].attach, seed=2)
                ),
            )
            for of, to in pairs
        ]
        loose, ended = network.hosts["p0"], list[bool]()

        async def keep_handing_over(source: Engine, target: Engine) -> None:
            while not flapped.is_set():
                ended.append(await try_handoff(source, target))

        flapped = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for source, target in engines:
                tasks.start_soon(keep_handing_over, source, target)
            try:
                for number in range(NUM_FLAPS):  # what a loose cable does takes time
                    loose.set_cable("down" if number % 2 == 0 else "up")
                    await anyio.sleep(0.1 + 0.05 * number)
            finally:
                loose.set_cable("up")
                flapped.set()
        async with anyio.create_task_group() as tasks:
            for source, target in engines:
                tasks.start_soon(works_again, source, target)

        assert any(ended)
        await until(lambda: all(map(nothing_held_back, network.decode)))


@pytest.mark.long
async def test_hosts_that_freeze_for_longer_than_any_deadline_and_thaw(network: Network) -> None:
    frozen = network.at["p0"], network.at["d1"]
    async with (
        long_pair(network, "p0", "d0") as (source, target),
        long_pair(network, "p1", "d1") as (elsewhere, reader),
    ):
        reads: list[tuple[Offer, Fetch]] = [
            await start_long_read(source, target),
            await start_long_read(elsewhere, reader),
        ]
        for agent in frozen:
            agent.signal(signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            failure = await failure_of(reads[0][1])
            await reads[0][1].blocks_freed()
            freed = target.snapshot()
            across = await with_engine_of("d0", network, elsewhere)
            await anyio.sleep(max(0.0, started_s + FROZEN_S - time.monotonic()))
        finally:
            for agent in frozen:
                agent.signal(signal.SIGCONT)
        late = await failure_of(reads[1][1])
        await reads[1][1].blocks_freed()
        for offer, _ in reads:
            await end_offer(offer)

        assert across
        assert {failure.code, late.code} <= set(ENDS_OF_CUT)
        assert same(target.snapshot(), freed)
        await works_again(source, target)
        await works_again(elsewhere, reader)
        await until(lambda: all(nothing_held_back(network.at[name]) for name in ("d0", "d1")))


async def with_engine_of(name: str, network: Network, source: Engine) -> bool:
    """Whether a new engine at this host gets all that a source has."""
    spec = make_spec(groups=(LARGE,))
    async with engine(
        DecodeSession, network.at[name].attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=3
    ) as target:
        return await works(source, target)
