"""Engines that are stopped while their KV moves: it goes on without them, and they hear of it."""

import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.engines import LARGE, NUM_LARGE_BLOCKS, Engine, engine, failure_of, make_spec, works
from tests.faults.conftest import Started
from tests.faults.engine_processes import EngineProcess

pytestmark = pytest.mark.anyio

ALL = {
    "num_tokens": NUM_LARGE_BLOCKS * LARGE.block_size,
    "block_ids": {"full": list(range(NUM_LARGE_BLOCKS))},
}
ONE_BLOCK = {"num_tokens": LARGE.block_size, "block_ids": {"full": [1]}}
DEADLINE_S = 3.0


@contextmanager
def stopped(one: EngineProcess) -> Iterator[None]:
    """The process does nothing until the end of the ``with``."""
    one.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        one.process.send_signal(signal.SIGCONT)


async def said(one: EngineProcess) -> Any:
    """Its next line."""
    with anyio.fail_after(60):
        return await anyio.to_thread.run_sync(one.said, abandon_on_cancel=True)


@pytest.fixture
def start(start_engine: Callable[..., EngineProcess]) -> Callable[..., EngineProcess]:
    """Starts engines that say how things ended."""
    return partial(start_engine, script="told_engine.py")


@pytest.fixture
async def target(slow: Started) -> AsyncIterator[Engine]:
    """A decode engine of this process."""
    spec = make_spec(groups=(LARGE,))
    attach = slow.all[1].attach
    async with engine(DecodeSession, attach, spec, seed=2, num_blocks=NUM_LARGE_BLOCKS) as made:
        yield made


@pytest.fixture
async def source(slow: Started) -> AsyncIterator[Engine]:
    """A prefill engine of this process."""
    spec = make_spec(groups=(LARGE,))
    attach = slow.all[0].attach
    async with engine(PrefillSession, attach, spec, seed=3, num_blocks=NUM_LARGE_BLOCKS) as made:
        yield made


def agent_of(slow: Started, role: str) -> AgentProcess:
    return next(one for one in slow.all if one.role == role)


async def test_the_offer_of_a_stopped_engine_is_read_and_it_hears_so_when_it_goes_on(
    slow, start, source, target
):
    other = start(agent_of(slow, "prefill"), "stopped-sealed", "sealed")
    ticket = await said(other)
    with stopped(other):
        fetch = target.decode.fetch(ticket, **ALL)
        await fetch.completed()
        others_work = await works(source, target)

    assert others_work
    assert await said(other) == Outcome.COMPLETED


async def test_a_fetch_of_what_a_stopped_engine_has_not_computed_ends_by_its_deadline(
    slow, start, source, target
):
    other = start(agent_of(slow, "prefill"), "stopped-open", "open")
    ticket = await said(other)
    with stopped(other):
        fetch = target.decode.fetch(ticket, **ONE_BLOCK, timeout_s=DEADLINE_S)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await fetch.cancel(release_offer=True)
        await until(lambda: not agent_of(slow, "prefill").status()["counts"]["offers"])
        others_work = await works(source, target)

    assert (failure.stage, failure.code) == ("waiting", ErrorCode.TIMEOUT)
    assert others_work
    assert await said(other) == Outcome.WITHDRAWN


async def test_what_a_stopped_engine_has_asked_for_is_read_and_it_hears_so_when_it_goes_on(
    slow, start, source, target
):
    offer = await source.prefill.offer("r", **ALL)
    decode = agent_of(slow, "decode")
    reader = start(decode, "stopped-reader", "decode", json.dumps(offer.ticket))
    assert await said(reader) == "asked"
    with stopped(reader):
        was_under_way = decode.status()["counts"]["fetches"]
        outcome = await offer.released()
        await until(lambda: not decode.status()["counts"]["fetches"])
        others_work = await works(source, target)

    assert was_under_way
    assert outcome is Outcome.COMPLETED
    assert others_work
    assert await said(reader) == Outcome.COMPLETED
