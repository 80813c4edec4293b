"""An engine truncates the memory that it shares: its handoffs end, the agent and the others go on.

Memory that torch shares cannot be sealed against that, and the next access to it is SIGBUS.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbus
from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import LARGE, NUM_LARGE_BLOCKS, engine, failure_of, make_spec, works

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).parent / "processes" / "cutting_engine.py"
NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
SHAPE: dict[str, Any] = {"num_blocks": NUM_LARGE_BLOCKS}
ENDED = (
    ErrorCode.ENGINE_LOST,
    ErrorCode.OFFER_WITHDRAWN,
    ErrorCode.PEER_LOST,
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
)


SLOW = {"slice_bytes": 4096, "slice_descriptors": 1, "close_timeout_s": 1.0}
PREFILL: dict[str, Any] = {"late_read_s": 1.0, "transport": SLOW}
DECODE: dict[str, Any] = {"lease_s": 3.0, "request_timeout_s": 5.0, "transport": SLOW}
TCP = {"env": {"UCX_TLS": "tcp"}}
SHARED_MEMORY: dict[str, Any] = {"env": {}}
MAPPED = {"env": {}, "mapped": True, "path": "mapped"}


@pytest.fixture(scope="module")
def shared_slow(request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Two agents whose reads take long, over a fabric or out of mapped memory."""
    env = {"env": request.param["env"]}
    with agents_ended(Agents) as agents:
        prefill = agents.prepare("prefill", **PREFILL, **env)
        decode = agents.prepare("decode", **DECODE, **request.param)
        for agent in (prefill, decode):
            agent.expected_trouble.add("segment.cut")
        agents.start(prefill, decode)
        yield agents


@pytest.fixture
def slow(shared_slow: Agents) -> Iterator[Agents]:
    """They hold nothing after each test."""
    yield shared_slow
    shared_slow.check()


class CuttingEngine:
    """The engine, in a process of its own."""

    def __init__(self, agent: AgentProcess, engine_id: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(agent.attach), engine_id, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(kvbus.__file__).parents[1])},
        )

    def said(self) -> Any:
        """Its next line."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def cut(self) -> None:
        """Have it truncate its memory."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.said() == "cut"


@pytest.fixture
def start_engine() -> Iterator[Callable[..., CuttingEngine]]:
    """Starts engines that end with the test."""
    started: list[CuttingEngine] = []

    def start(agent: AgentProcess, engine_id: str, *arguments: str) -> CuttingEngine:
        started.append(CuttingEngine(agent, engine_id, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


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
async def test_a_prefill_engine_that_cuts_its_memory_fails_its_own_readers(
    slow: Agents, start_engine: Callable[..., CuttingEngine], role: str
) -> None:
    prefill, decode = slow.all
    async with (
        engine(DecodeSession, decode.attach, make_spec(groups=(LARGE,)), **SHAPE) as target,
        engine(PrefillSession, prefill.attach, make_spec(groups=(LARGE,)), **SHAPE) as other,
    ):
        assert await works(other, target)
        hostile = start_engine(prefill, make_spec().engine_id, role)
        ticket = hostile.said()
        blocks = target.some_blocks(6, NUM_TOKENS)
        fetch = target.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=blocks)
        await until(lambda: prefill.status()["counts"]["leases"] > 0)

        hostile.cut()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        still_works = await works(other, target)

    assert prefill.alive
    assert decode.alive
    assert failure.code in ENDED
    assert still_works


@pytest.mark.parametrize("shared_slow", [TCP, MAPPED], indirect=True, ids=["tcp", "mapped"])
async def test_a_decode_engine_that_cuts_its_memory_fails_its_own_fetches(
    slow: Agents, start_engine: Callable[..., CuttingEngine]
) -> None:
    prefill, decode = slow.all
    async with (
        engine(PrefillSession, prefill.attach, make_spec(groups=(LARGE,)), **SHAPE) as source,
        engine(DecodeSession, decode.attach, make_spec(groups=(LARGE,)), **SHAPE) as other,
    ):
        assert await works(source, other)
        blocks = source.some_blocks(5, NUM_TOKENS)
        offer = await source.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=blocks)
        engine_id = make_spec().engine_id
        hostile = start_engine(decode, engine_id, "decode", json.dumps(offer.ticket))
        assert hostile.said() == {}
        await until(lambda: prefill.status()["counts"]["leases"] > 0)

        hostile.cut()
        (failed,) = decode.says("handoff.failed", engine_id=engine_id)
        still_works = await works(source, other)
        await offer.withdraw()
        await offer.released()

    assert prefill.alive
    assert decode.alive
    assert failed["code"] in ENDED
    assert still_works
