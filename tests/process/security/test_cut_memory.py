"""An engine truncates the memory that it shares: its handoffs end, and all others continue.

Memory that torch shares cannot be sealed against that, and the next access to it is SIGBUS.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.errors import ErrorCode
from tests.support.agents import AgentProcess, Agents, agents_ended, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    begin,
    engine,
    failure_of,
    make_spec,
    works,
)
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

BLOCKS = {"full": list(range(NUM_LARGE_BLOCKS))}
NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
ENDED = (
    ErrorCode.ENGINE_LOST,
    ErrorCode.OFFER_WITHDRAWN,
    ErrorCode.PEER_LOST,
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
)
SLOW = {"slice_bytes": 4096}
TCP: dict[str, Any] = {"env": {"UCX_TLS": "tcp"}}
SHARED_MEMORY: dict[str, Any] = {"env": {}}
MAPPED: dict[str, Any] = {"env": {}, "mapped": True, "path": "mapped"}


@pytest.fixture(scope="module")
def shared_slow(request: pytest.FixtureRequest) -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        env = request.param["env"]
        agents.prepare("prefill", late_read_s=1.0, env=env, **SLOW)
        reads: dict[str, Any] = {"lease_s": 3.0, "request_timeout_s": 5.0, **SLOW}
        agents.prepare("decode", **reads, **request.param)
        for agent in agents.all:
            agent.expected_trouble.add("segment.cut")
        agents.start(*agents.all)
        yield agents


@pytest.fixture
def slow(shared_slow: Agents) -> Iterator[list[AgentProcess]]:
    yield shared_slow.all
    assert all(agent.alive for agent in shared_slow.all)
    shared_slow.check()


class Hostile:
    """An engine that can `cut` its memory; this process does not touch it afterwards."""

    def __init__(self, made: Engine, fds: set[int]) -> None:
        self.engine, self._fds = made, fds

    def cut(self) -> None:
        self.engine.control.caches = ()
        for fd in self._fds:
            os.ftruncate(fd, 0)


def torch_fds() -> set[int]:
    """The files of torch's shared memory, which cannot be sealed."""
    fds = Path("/proc/self/fd").iterdir()
    return {int(fd.name) for fd in fds if fd.is_symlink() and fd.readlink().name[:6] == "torch_"}


@asynccontextmanager
async def hostile_at(agent: AgentProcess, *, direct: bool = True) -> AsyncIterator[Hostile]:
    before, memory = torch_fds(), Memory(apart=True, direct=direct)
    async with large(agent, memory=memory, seed=1) as made:
        yield Hostile(made, torch_fds() - before)


def large(agent: AgentProcess, **options: Any) -> Any:
    spec = make_spec(groups=(LARGE,))
    return engine(agent.attach, spec, num_blocks=NUM_LARGE_BLOCKS, **options)


# Over TCP the prefill agent serves the READ and touches the memory; it copies unregistered memory.
# Through shared memory the kernel reads, and UCX closes the connection. Mapped memory is touched
# by the decode agent alone: the prefill agent would confirm.
@pytest.mark.parametrize(
    ("shared_slow", "direct"),
    [
        (TCP, True),
        pytest.param(TCP, False, marks=pytest.mark.long),
        (SHARED_MEMORY, True),
        (MAPPED, True),
    ],
    indirect=["shared_slow"],
    ids=["read over tcp", "copied", "read through shared memory", "mapped"],
)
async def test_engine_cutting_its_memory_fails_only_its_own_handoffs(
    slow: list[AgentProcess], direct: bool
) -> None:
    prefill, decode = slow
    some: dict[str, Any] = {"num_tokens": NUM_TOKENS, "block_ids": BLOCKS}
    async with large(decode) as target, large(prefill) as source:
        assert await works(source, target)
        async with hostile_at(prefill, direct=direct) as hostile:
            offer = await hostile.engine.prefill.offer("r", **some)
            fetch = target.decode.fetch(offer.ticket, **some)
            await until(lambda: prefill.status()["counts"]["leases"] > 0)
            hostile.cut()
            failure = await failure_of(fetch)
            await fetch.freed
        assert failure.code in ENDED
        assert await works(source, target)
        offer = await source.prefill.offer("r", **some)
        async with hostile_at(decode, direct=direct) as hostile:
            hostile.engine.decode.fetch(offer.ticket, **some)
            await until(lambda: prefill.status()["counts"]["leases"] > 0)
            hostile.cut()
            (failed,) = await anyio.to_thread.run_sync(
                partial(decode.says, "handoff.failed", engine_id=hostile.engine.spec.engine_id)
            )
        assert failed["code"] in ENDED
        assert await works(source, target)
        await offer.withdraw()
        await offer.ended


async def test_reads_of_others_complete_after_engine_cuts_its_memory(fresh: Agents) -> None:
    """UCX closes the connection that all engines of an agent share. No read has a lease."""
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode", path="direct")
    prefill.expected_trouble.add("segment.cut")
    fresh.start(prefill, decode)
    short: dict[str, Any] = {"num_tokens": 64, "block_ids": {"full": [0]}}
    async with large(decode) as target, large(prefill) as other:
        for _ in range(3):
            assert await works(other, target)
        async with hostile_at(prefill) as hostile:
            offers = [await hostile.engine.prefill.offer(name, **short) for name in "ab"]
            await target.decode.fetch(offers[0].ticket, **short).ended
            hostile.cut()
            failure = await failure_of(target.decode.fetch(offers[1].ticket, **short))
            for _ in range(3):
                handoff = await begin(other, target)
                await handoff.completed()
    (line,) = decode.says("handoff.failed")
    assert (line["attempts"], line["leased"], failure.code) == (2, False, ErrorCode.ENGINE_LOST)
