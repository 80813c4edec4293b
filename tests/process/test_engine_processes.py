"""Processes of an engine are killed, or stopped: all of it is freed at once, or its KV moves on.

Whatever would free it later, a lease, a deadline, or the time for late reads, is far away.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import LARGE, NUM_LARGE_BLOCKS, engine, failure_of, make_spec, pair, works
from tests.process.engine_processes import EngineInProcesses, in_processes
from tests.process.lanes import OVER_TCP, SLICES

pytestmark = pytest.mark.anyio

FAR_S = 120.0
LATER: dict[str, dict[str, Any]] = {
    "prefill": {"late_read_s": FAR_S, "max_lease_s": FAR_S},
    "decode": {"lease_s": FAR_S, "request_timeout_s": FAR_S, "fetch_timeout_s": FAR_S},
}
PATHS: dict[str, dict[str, Any]] = {
    "packed": {**OVER_TCP, "path": "packed"},
    "mapped": {"transport": SLICES, "path": "mapped", "mapped": True},
}
KILLED = [
    pytest.param("rank", "packed"),
    pytest.param("control", "mapped"),
    pytest.param("rank", "mapped", marks=pytest.mark.long),
    pytest.param("control", "packed", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Agents]]:
    """Agents that give nothing up soon, a pair for each path when it is asked for."""
    with agents_ended(Agents) as packed, agents_ended(Agents) as mapped:
        yield {"packed": packed, "mapped": mapped}


@pytest.fixture
def agents(shared: dict[str, Agents], path: str) -> Iterator[list[AgentProcess]]:
    """A prefill and a decode agent, which hold nothing after each test."""
    these = shared[path]
    if not these.all:
        env = PATHS[path].get("env", {})
        these.start(
            these.prepare("prefill", **LATER["prefill"], env=env),
            these.prepare("decode", **LATER["decode"], **PATHS[path]),
        )
    yield these.all
    these.check()


async def kill(one: EngineInProcesses, part: str) -> None:
    """Kill one process; the other is sent away, and nobody maps any of its memory."""
    one.parts.pop(part).kill()
    (survivor,) = one.parts.values()
    assert (await survivor.says())["ended"] == ErrorCode.PEER_LOST
    survivor.kill()
    await until(lambda: one.num_mappings == 0)


@pytest.mark.parametrize(("killed", "path"), KILLED)
async def test_a_prefill_engine_is_freed_at_once_whichever_process_of_it_is_killed(
    agents: list[AgentProcess], killed: str
) -> None:
    prefill, decode = agents
    with in_processes(prefill) as (doomed,):
        async with (
            pair(prefill.attach, decode.attach) as others,
            engine(
                DecodeSession,
                decode.attach,
                make_spec(groups=(LARGE,)),
                num_blocks=NUM_LARGE_BLOCKS,
            ) as target,
        ):
            ticket = await doomed.start(("1", "rank"), ("0", "prefill"))
            num_tokens = ticket["num_tokens"]
            fetch = target.decode.fetch(
                ticket, num_tokens=num_tokens, block_ids=target.some_blocks(6, num_tokens)
            )
            await until(lambda: "-> reading" in str(decode.status(fetch_id=fetch.fetch_id)))

            await kill(doomed, "rank" if killed == "rank" else "prefill")
            failure = await failure_of(fetch)
            await fetch.blocks_freed()

            assert failure.code is ErrorCode.ENGINE_LOST
            assert prefill.says("offer.released", engine_id=doomed.engine_id, outcome="withdrawn")
            assert await works(*others)


@pytest.mark.parametrize(("killed", "path"), KILLED)
async def test_a_decode_engine_is_freed_at_once_whichever_process_of_it_is_killed(
    agents: list[AgentProcess], killed: str
) -> None:
    prefill, decode = agents
    with in_processes(decode) as (doomed,):
        async with (
            engine(
                PrefillSession,
                prefill.attach,
                make_spec(groups=(LARGE,)),
                num_blocks=NUM_LARGE_BLOCKS,
            ) as source,
            engine(DecodeSession, decode.attach, make_spec(groups=(LARGE,)), num_blocks=4) as other,
        ):
            num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
            offer = await source.prefill.offer(
                "r", num_tokens=num_tokens, block_ids=source.some_blocks(5, num_tokens)
            )
            asked = await doomed.start(("1", "rank"), ("0", "decode"), ticket=offer.ticket)
            await until(lambda: "-> reading" in str(decode.status(fetch_id=asked["fetch_id"])))

            await kill(doomed, "rank" if killed == "rank" else "decode")
            again = other.decode.fetch(offer.ticket, num_tokens=64, block_ids={"full": [1]})
            await again.completed()

            assert await offer.released() is Outcome.COMPLETED
            assert decode.says("handoff.failed", engine_id=doomed.engine_id, code="engine_lost")


@pytest.mark.parametrize("path", ["packed"])
async def test_kv_moves_between_engines_that_are_stopped_and_they_hear_so_when_they_go_on(
    agents: list[AgentProcess],
) -> None:
    prefill, decode = agents
    with in_processes(prefill, decode) as (source, target):
        ticket = await source.start(("0,1", "prefill"))
        await target.start(("0,1", "decode"), ticket=ticket)
        stopped = source.parts["prefill"], target.parts["decode"]
        for part in stopped:
            part.process.send_signal(signal.SIGSTOP)
        were_under_way = decode.status()["counts"]["fetches"]
        await until(decode.idle)
        async with pair(prefill.attach, decode.attach) as others:
            others_work = await works(*others)
        for part in stopped:
            part.process.send_signal(signal.SIGCONT)

        assert were_under_way
        assert others_work
        assert [(await part.says())["ended"] for part in stopped] == [Outcome.COMPLETED] * 2
