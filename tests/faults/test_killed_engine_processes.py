"""One process of an engine is killed while its agents are busy: all of the engine is freed at once.

Whatever would free it later, a lease, a deadline, or the time for late reads, is far away.
"""

import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.engines import LARGE, NUM_LARGE_BLOCKS, engine, failure_of, make_spec
from tests.faults.conftest import SLOW_COPIES, SLOW_READS, Started
from tests.faults.engine_processes import EngineProcess, num_mappings_of
from tests.faults.kept_engines import BLOCKS_EACH, Handoffs, kept_engine
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

NUM_HANDOFFS = 2
LATER = {
    "prefill": {"late_read_s": 120.0, "max_lease_s": 120.0},
    "decode": {"lease_s": 120.0, "request_timeout_s": 120.0, "fetch_timeout_s": 120.0},
}
PATHS: dict[str, dict[str, Any]] = {"packed": SLOW_READS, "mapped": SLOW_COPIES}
StartPart = Callable[..., EngineProcess]


@pytest.fixture
def patient(fresh: Started) -> Callable[[str], Started]:
    """Starts agents that read slowly, or copy slowly, and give nothing up soon."""

    def start(path: str) -> Started:
        settings = PATHS[path]
        prefill = fresh.prefill(**LATER["prefill"], env=settings.get("env", {}))
        fresh.start(prefill, fresh.decode(**LATER["decode"], **settings))
        return fresh

    return start


@asynccontextmanager
async def busy(agents: Started) -> AsyncIterator[None]:
    """Other engines hand over all the time, before and after."""
    prefill, decode = agents.all
    shape = {"num_blocks": NUM_HANDOFFS * BLOCKS_EACH}
    async with (
        kept_engine(PrefillSession, prefill.attach, **shape) as source,
        kept_engine(DecodeSession, decode.attach, **shape) as target,
        anyio.create_task_group() as tasks,
    ):
        handoffs = [Handoffs(source, target, number) for number in range(NUM_HANDOFFS)]
        for one in handoffs:
            tasks.start_soon(one.run)
        await until(lambda: all(one.num_completed for one in handoffs))
        yield
        before = [one.num_completed for one in handoffs]
        await until(
            lambda: all(one.num_completed > n for one, n in zip(handoffs, before, strict=True))
        )
        for one in handoffs:
            one.is_over = True
    assert [one.trouble for one in handoffs] == [[]] * NUM_HANDOFFS
    assert {times for one in handoffs for times in one.ends.values()} == {1}


def is_read(decode: AgentProcess, fetch_id: str) -> bool:
    """Whether bytes of the fetch are on their way."""
    return "-> reading" in str(ask(decode.peer, "status", {"fetch_id": fetch_id})["ok"]["story"])


def started(
    start_engine: StartPart, agent: AgentProcess, engine_id: str, *control: str
) -> dict[str, EngineProcess]:
    """The processes of one engine, all of them registered."""
    parts = {
        f"rank {rank}": start_engine(agent, engine_id, "rank", str(rank), script="engine_part.py")
        for rank in range(2)
    }
    for part in parts.values():
        part.said()
    parts["control"] = start_engine(agent, engine_id, *control, script="engine_part.py")
    return parts


async def kill(parts: dict[str, EngineProcess], name: str, engine_id: str) -> None:
    """End one of them; returns once the others were sent away, and nobody maps their memory."""
    parts.pop(name).kill()
    for survivor in parts.values():
        lost = (await anyio.to_thread.run_sync(survivor.said))["lost"]
        assert lost == ErrorCode.PEER_LOST
        survivor.kill()
    await until(lambda: num_mappings_of(engine_id) == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("killed", "path"), [("control", "mapped"), ("rank 1", "packed")])
async def test_a_prefill_engine_is_freed_at_once_whichever_process_of_it_is_killed(
    patient, start_engine, killed, path
):
    agents = patient(path)
    prefill, decode = agents.all
    doomed_id = uuid.uuid4().hex
    spec = make_spec(groups=(LARGE,))
    async with (
        busy(agents),
        engine(DecodeSession, decode.attach, spec, num_blocks=NUM_LARGE_BLOCKS) as target,
    ):
        parts = started(start_engine, prefill, doomed_id, "prefill")
        ticket = parts["control"].said()
        blocks = target.some_blocks(6, ticket["num_tokens"])
        fetch = target.decode.fetch(ticket, num_tokens=ticket["num_tokens"], block_ids=blocks)
        await until(lambda: is_read(decode, fetch.fetch_id))

        await kill(parts, killed, doomed_id)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.ENGINE_LOST
        assert prefill.says("offer.released", engine_id=doomed_id, outcome="withdrawn")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("killed", "path"), [("control", "packed"), ("rank 1", "packed")])
async def test_a_decode_engine_is_freed_at_once_whichever_process_of_it_is_killed(
    patient, start_engine, killed, path
):
    agents = patient(path)
    prefill, decode = agents.all
    doomed_id = uuid.uuid4().hex
    shape = {"num_blocks": NUM_LARGE_BLOCKS}
    async with (
        busy(agents),
        engine(PrefillSession, prefill.attach, make_spec(groups=(LARGE,)), **shape) as source,
        engine(DecodeSession, decode.attach, make_spec(groups=(LARGE,)), **shape) as other,
    ):
        num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
        blocks = source.some_blocks(5, num_tokens)
        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=blocks)
        ticket = json.dumps(offer.ticket)
        parts = started(start_engine, decode, doomed_id, "decode", ticket)
        fetch_id = parts["control"].said()["fetch_id"]
        await until(lambda: is_read(decode, fetch_id))

        await kill(parts, killed, doomed_id)
        again = other.decode.fetch(offer.ticket, num_tokens=64, block_ids={"full": [1]})
        await again.completed()

        assert await offer.released() is Outcome.COMPLETED
        assert decode.says("handoff.failed", engine_id=doomed_id, code="engine_lost")
