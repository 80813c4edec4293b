"""A prefill agent that does not answer is tried now and then, and fetches from it fail at once."""

import json
import shlex
import signal

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import Offer
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.keys import Role
from kvbus_decode.peer.reach import NUM_TIMEOUTS
from tests.agents import AgentProcess, until
from tests.engines import Engine, failure_of, pair, works
from tests.faults.conftest import DECODE, PREFILL, Started
from tests.keyring import KeyRing

pytestmark = pytest.mark.anyio

LONG_S = 120.0
"""Longer than a test may wait: what fails in it has not waited for its deadline."""


@pytest.fixture
def agents(fresh: Started) -> tuple[AgentProcess, AgentProcess]:
    prefill, decode = fresh.prefill(), fresh.decode(request_timeout_s=1.0)
    fresh.start(prefill, decode)
    return prefill, decode


async def failed(target: Engine, offer: Offer, timeout_s: float = LONG_S) -> FetchFailed:
    fetch = target.decode.fetch(
        offer.ticket, num_tokens=16, block_ids={"full": [1]}, timeout_s=timeout_s
    )
    failure = await failure_of(fetch)
    assert failure.blocks_free
    return failure


async def fall_silent(
    agents: tuple[AgentProcess, AgentProcess], source: Engine, target: Engine
) -> Offer:
    """Stop the prefill agent, and ask it as often as it takes."""
    prefill, decode = agents
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
    prefill.signal(signal.SIGSTOP)
    stages = []
    while not decode.metric("silent_peers"):
        stages.append((await failed(target, offer)).stage)
    assert len(stages) >= NUM_TIMEOUTS
    assert "requested" not in stages
    return offer


@pytest.mark.parametrize("is_known", [False, True], ids=["never met", "met before"])
async def test_fetches_from_an_agent_that_does_not_answer_fail_at_once_until_it_does(
    agents, is_known
):
    prefill, decode = agents
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert not is_known or await works(source, target)
        offer = await fall_silent(agents, source, target)

        refused = await failed(target, offer)
        silent = decode.status()["silent_peers"]
        num_refused = decode.metric("silent_peer_refusals")
        prefill.signal(signal.SIGCONT)
        if is_known:  # a heartbeat, or the answer to a ping, comes over a connection that is there
            await until(lambda: not decode.metric("silent_peers"))

        assert (refused.code, refused.stage) == (ErrorCode.PEER_UNREACHABLE, "requested")
        assert "without an answer" in refused.message
        assert silent.keys() == {prefill.peer}
        assert num_refused == 1
        assert decode.says("peer.unanswering", peer=prefill.peer)
        await until(lambda: not decode.status()["silent_peers"])
        assert await works(source, target)
        await offer.withdraw()


async def test_one_fetch_tries_and_reads_nothing_before_it_is_answered(agents):
    prefill, decode = agents
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        sealed = await source.prefill.offer("s", num_tokens=16, block_ids={"full": [1]})
        offer = await fall_silent(agents, source, target)

        stages: list[str] = []
        while not stages or stages[-1] == "requested":
            stages.append((await failed(target, sealed)).stage)

        first_s, second_s = (line["retry_s"] for line in decode.says("peer.unanswering")[:2])
        assert stages[-1] == "claiming"
        assert first_s <= second_s
        prefill.signal(signal.SIGCONT)
        await until(lambda: not decode.metric("silent_peers"))
        assert await works(source, target)
        await offer.withdraw()
        await sealed.withdraw()


async def test_the_command_that_a_fault_names_is_whole_where_there_are_keys(fresh: Started):
    ring = KeyRing(fresh.folder)
    prefill = ring.prepare(fresh, Role.PREFILL, "p", **PREFILL)
    decode = ring.prepare(fresh, Role.DECODE, "d", **{**DECODE, "request_timeout_s": 1.0})
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await fall_silent((prefill, decode), source, target)
        live = json.loads(decode.page("/live")[1])
        prefill.signal(signal.SIGCONT)
        fault = next(one for one in live["faults"] if prefill.peer in one["what"])
        command = shlex.split(fault["do"].partition("run here: kvbus ")[2])
        done = await anyio.to_thread.run_sync(CliRunner().invoke, app, command)

        assert done.exit_code == 0, done.output
        assert "the prefill agent 'prefill-0' answers" in done.output
        assert f"--server-key={ring.pair('d').public}" in shlex.split(live["key_options"])
        await until(lambda: not decode.status()["silent_peers"])
        await offer.withdraw()
