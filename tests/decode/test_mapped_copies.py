"""Copies of mapped memory from the inside: what happens at the worst moment of one."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from kvbus.memory import libc
from kvbus_decode.read import jobs
from tests.agents import WITHIN_S, until
from tests.decode.lent import Neighbours, neighbours
from tests.engines import Engine, failure_of, works

pytestmark = pytest.mark.anyio

MANY_TOKENS = 600
Act = Callable[[], object]


def before_each_copy(monkeypatch: pytest.MonkeyPatch, act: Act) -> None:
    """Have ``act`` done in the copying thread, before bytes move."""
    for name in ("copy_runs", "copy_few_runs"):
        copy = getattr(jobs, name)

        def acting(runs: Any, copy: Callable[[Any], None] = copy) -> None:
            act()
            copy(runs)

        monkeypatch.setattr(jobs, name, acting)


async def begin(source: Engine, target: Engine, num_tokens: int) -> tuple[Offer, Fetch]:
    theirs, ours = source.some_blocks(3, num_tokens), target.some_blocks(4, num_tokens)
    offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
    return offer, target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)


def end_memory(both: Neighbours) -> None:
    """Zeros are under the map from now on, and nobody has dropped the route yet."""
    memory = both.the_memory()
    memory.close("it was cut")
    for first, end in memory.extents:
        libc.map_zeros_over(first, end - first)


@pytest.mark.parametrize("num_tokens", [16, MANY_TOKENS], ids=["on the loop", "in a thread"])
async def test_zeros_are_not_confirmed_though_the_lease_lives(folder, monkeypatch, num_tokens):
    async with neighbours(folder) as both, both.engines() as (source, target):
        assert await works(source, target)
        with monkeypatch.context() as patched:
            before_each_copy(patched, lambda: end_memory(both))
            offer, fetch = await begin(source, target, num_tokens)
            failure = await failure_of(fetch)
            await offer.withdraw()
            await offer.released()

        assert failure.code is ErrorCode.TRANSFER_FAILED
        assert "the memory that was copied from is gone: it was cut" in failure.message


async def test_an_engine_that_is_lost_under_a_copy_is_named_by_its_agent(folder, monkeypatch):
    async with neighbours(folder) as both, both.engines() as (source, target):
        assert await works(source, target)
        prefill = both.prefill.runtime
        (lost,) = prefill.agent.engines.engines.values()

        def lose() -> None:
            prefill.service.on_engine_lost(lost)
            end_memory(both)

        before_each_copy(monkeypatch, lose)
        monkeypatch.setattr(prefill.agent.engines, "engines", {})
        _, fetch = await begin(source, target, 16)
        failure = await failure_of(fetch)
        monkeypatch.undo()

        assert failure.code is ErrorCode.ENGINE_LOST


async def test_a_warm_route_whose_memory_was_cut_is_made_again(folder):
    async with neighbours(folder) as both, both.engines() as (source, target):
        assert await works(source, target)
        (route,) = both.all_routes

        both.the_memory().cut()

        assert await works(source, target)
        assert route not in both.all_routes


async def test_blocks_are_withheld_while_a_job_runs_and_no_further_one_begins(folder, monkeypatch):
    gate, begun = threading.Event(), list[int]()

    def hold() -> None:
        begun.append(len(begun))
        assert gate.wait(WITHIN_S)

    async with neighbours(folder) as both, both.engines() as (source, target):
        transport = both.decode.agent.transport
        transport.limits = replace(transport.limits, slice_bytes=4096)
        assert await works(source, target)
        before_each_copy(monkeypatch, hold)
        offer, fetch = await begin(source, target, MANY_TOKENS)
        await until(lambda: begun)

        await fetch.cancel()
        failure = await failure_of(fetch)
        freed = anyio.Event()

        async def wait_freed() -> None:
            await fetch.blocks_freed()
            freed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_freed)
            await offer.withdraw()
            await offer.released()  # all has been said by then
            freed_before = freed.is_set()
            gate.set()

        assert (failure.code, failure.blocks_free) == (ErrorCode.CANCELLED, False)
        assert not freed_before
        assert begun == [0]
