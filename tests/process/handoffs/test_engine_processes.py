"""A killed process of an engine frees the engine, long before any lease or deadline."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvbus.errors import ErrorCode
from tests.process.faults.conftest import SLOW_READS
from tests.support.agents import AgentProcess, Agents, agents_ended, until
from tests.support.engine_program import EngineConfig, EngineProcess, fetch_order
from tests.support.engines import LARGE, NUM_LARGE_BLOCKS, make_spec, pair, works

pytestmark = pytest.mark.anyio

FAR_S = 120.0
LATER: dict[str, dict[str, Any]] = {
    "prefill": {"late_read_s": FAR_S, "max_lease_s": FAR_S},
    "decode": {"lease_s": FAR_S, "request_timeout_s": FAR_S, "fetch_timeout_s": FAR_S},
}
PATHS: dict[str, dict[str, Any]] = {
    "packed": {**SLOW_READS, "path": "packed"},
    "mapped": {"slice_bytes": 4096, "path": "mapped", "mapped": True},
}
BLOCKS = {LARGE.name: NUM_LARGE_BLOCKS}
ALL = NUM_LARGE_BLOCKS * LARGE.block_size
SPEC = make_spec(tp=2, groups=(LARGE,))
WHOLE = ((0, 1),)
"""An engine of one process; in several, the last has the control session."""


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[Agents]:
    reads = PATHS[request.param]
    with agents_ended(Agents) as agents:
        prefill = agents.prepare("prefill", **LATER["prefill"], env=reads.get("env", {}))
        agents.start(prefill, agents.prepare("decode", **LATER["decode"], **reads))
        yield agents


@asynccontextmanager
async def in_processes(
    agent: AgentProcess, *parts: tuple[int, ...]
) -> AsyncIterator[list[EngineProcess]]:
    made = []
    spec = make_spec(tp=2, groups=(LARGE,), engine_id=uuid.uuid4().hex)
    try:
        for number, ranks in enumerate(parts, 1):
            role = agent.role if number == len(parts) else "rank"
            config = EngineConfig(role, str(agent.attach), spec, BLOCKS, ranks=ranks)
            made.append(EngineProcess(config, agent.folder / f"engine-{number}.log"))
            await made[-1].start()
            await made[-1].up.wait()
        yield made
    finally:
        for one in made:
            await one.kill()


@pytest.mark.parametrize(
    ("shared", "role", "killed"),
    [
        ("packed", "prefill", "rank"),
        ("packed", "decode", "rank"),
        ("mapped", "prefill", "control"),
        ("mapped", "decode", "control"),
    ],
    indirect=["shared"],
)
async def test_kill_of_any_engine_process_frees_engine_at_once(
    agents: Agents, role: str, killed: str
) -> None:
    prefill, decode = agents.all
    parts = {"prefill": WHOLE, "decode": WHOLE, role: ((1,), (0,))}
    async with (
        in_processes(prefill, *parts["prefill"]) as sources,
        in_processes(decode, *parts["decode"]) as targets,
        pair(prefill.attach, decode.attach) as others,
    ):
        offered = sources[-1].ask(1, {"do": "offer", "steps": [ALL]})
        order = fetch_order(1, SPEC, (await offered.made)["ticket"], ALL)
        fetched = targets[-1].ask(2, order)
        await until(lambda: "-> reading" in str(decode.status(fetch_id=order["fetch_id"])))
        rank, control = sources if role == "prefill" else targets
        doomed, survivor = (rank, control) if killed == "rank" else (control, rank)
        engine_id = control.config.spec.engine_id
        await doomed.kill()
        await until(lambda: survivor.lost)
        await survivor.kill()
        await until(lambda: not any(agent.memory_maps(engine_id) for agent in agents.all))
        assert survivor.lost[0] == ErrorCode.PEER_LOST
        if role == "prefill":
            assert (await fetched.ended)["code"] == ErrorCode.ENGINE_LOST
            assert (await fetched.freed)["is_free"]
            assert prefill.says("offer.released", engine_id=engine_id, outcome="withdrawn")
        else:
            assert decode.says("handoff.failed", engine_id=engine_id, code="engine_lost")
            await until(lambda: not prefill.status()["counts"]["leases"])
        assert await works(*others)
