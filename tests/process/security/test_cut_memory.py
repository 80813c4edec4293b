"""An engine truncates the memory that it shares: its handoffs end, the agent and the others go on.

Memory that torch shares cannot be sealed against that, and the next access to it is SIGBUS.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import kvbus
from kvbus.errors import ErrorCode
from tests.support.agents import AgentProcess, Agents, agents_ended, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    begin,
    engine,
    failure_of,
    make_spec,
    works,
)

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).parent / "processes" / "cutting_engine.py"
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
    """Two agents whose reads take long, over a fabric or out of mapped memory."""
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
    """They live and hold nothing after each test."""
    yield shared_slow.all
    assert all(agent.alive for agent in shared_slow.all)
    shared_slow.check()


class Hostile:
    """An engine in a process of its own that cuts its memory when it is told to."""

    def __init__(self, agent: AgentProcess, role: str, *ticket: str) -> None:
        self.engine_id = make_spec().engine_id
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(agent.attach), self.engine_id, role, *ticket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(kvbus.__file__).parents[1])},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def said(self) -> Any:
        """Its next line."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def cut(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self.said() == "cut"


def large(agent: AgentProcess) -> Any:
    """An engine whose handoffs take long."""
    return engine(agent.attach, make_spec(groups=(LARGE,)), num_blocks=NUM_LARGE_BLOCKS)


# Over TCP the agent serves the READ itself, and so touches the memory; what is unregistered it
# copies. Through shared memory the kernel reads, finds none, and UCX gives up the connection. What
# is mapped the decode agent touches; the prefill agent does not, and would confirm.
@pytest.mark.parametrize(
    ("shared_slow", "role"),
    [
        (TCP, "prefill"),
        pytest.param(TCP, "staged-prefill", marks=pytest.mark.long),
        pytest.param(SHARED_MEMORY, "prefill", marks=pytest.mark.long),
        (MAPPED, "prefill"),
    ],
    indirect=["shared_slow"],
    ids=["read over tcp", "copied", "read through shared memory", "mapped"],
)
async def test_prefill_engine_cutting_its_memory_fails_its_own_readers(
    slow: list[AgentProcess], role: str
) -> None:
    prefill, decode = slow
    async with large(decode) as target, large(prefill) as other:
        assert await works(other, target)
        with Hostile(prefill, role) as hostile:
            blocks = target.some_blocks(6, NUM_TOKENS)
            fetch = target.decode.fetch(hostile.said(), num_tokens=NUM_TOKENS, block_ids=blocks)
            await until(lambda: prefill.status()["counts"]["leases"] > 0)

            hostile.cut()
            failure = await failure_of(fetch)
            await fetch.freed

        assert failure.code in ENDED
        assert await works(other, target)


async def test_reads_of_others_complete_after_engine_cuts_its_memory(
    fresh: Agents,
) -> None:
    """UCX gives up the connection that all engines of an agent share. No read has a lease."""
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode", path="direct")
    prefill.expected_trouble.add("segment.cut")
    fresh.start(prefill, decode)
    short: dict[str, Any] = {"num_tokens": 64, "block_ids": {"full": [1]}}
    async with large(decode) as target, large(prefill) as other:
        for _ in range(3):
            assert await works(other, target)
        with Hostile(prefill, "short-prefill") as hostile:
            tickets = [hostile.said() for _ in range(2)]
            await target.decode.fetch(tickets[0], **short).ended
            hostile.cut()
            failure = await failure_of(target.decode.fetch(tickets[1], **short))

            for _ in range(3):
                handoff = await begin(other, target)
                await handoff.completed()

    (line,) = decode.says("handoff.failed")
    assert (line["attempts"], line["leased"], failure.code) == (2, False, ErrorCode.ENGINE_LOST)


@pytest.mark.parametrize("shared_slow", [TCP, MAPPED], indirect=True, ids=["tcp", "mapped"])
async def test_decode_engine_cutting_its_memory_fails_its_own_fetches(
    slow: list[AgentProcess],
) -> None:
    prefill, decode = slow
    async with large(prefill) as source, large(decode) as other:
        assert await works(source, other)
        blocks = source.some_blocks(5, NUM_TOKENS)
        offer = await source.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=blocks)
        with Hostile(decode, "decode", json.dumps(offer.ticket)) as hostile:
            assert hostile.said() == {}
            await until(lambda: prefill.status()["counts"]["leases"] > 0)

            hostile.cut()
            (failed,) = decode.says("handoff.failed", engine_id=hostile.engine_id)

        assert failed["code"] in ENDED
        assert await works(source, other)
        await offer.withdraw()
        await offer.ended
