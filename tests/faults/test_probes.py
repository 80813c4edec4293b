"""What a kubelet or a balancer is told by the HTTP port of an agent that is well, or is not."""

import json
import signal
import urllib.error
from pathlib import Path

import pytest

from kvbus.engine import PrefillSession
from tests.agents import AgentProcess, until, wait_until
from tests.engines import engine, make_spec, pair
from tests.faults.conftest import Started

pytestmark = pytest.mark.anyio

WELL = (200, "ok\n")
TOKEN = "a-token-of-some-length"


async def test_an_agent_is_ready_once_an_engine_is_there_where_it_is_to_have_one(
    fresh: Started,
) -> None:
    agent = fresh.prefill(ready_needs_engine=True)
    fresh.start(agent)
    before, alive = agent.page("/readyz"), agent.page("/healthz")

    async with engine(PrefillSession, agent.attach, make_spec()):
        during = agent.page("/readyz")
    await until(lambda: agent.page("/readyz")[0] == 503)

    assert (before[0], "no engine" in before[1]) == (503, True)
    assert alive == during == WELL


async def test_an_agent_that_drains_lives_and_is_not_ready(fresh: Started) -> None:
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert prefill.page("/readyz") == WELL
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=0, block_ids={"full": []})
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        prefill.signal(signal.SIGTERM)
        await until(lambda: prefill.status()["draining"])

        assert prefill.page("/healthz") == WELL
        status, said = prefill.page("/readyz")
        assert (status, "draining" in said) == (503, True)
        await offer.seal()
        await fetch.completed()
        await offer.released()


def test_an_agent_that_is_stopped_answers_no_probe_and_is_well_when_it_goes_on(
    fresh: Started,
) -> None:
    agent = fresh.decode()
    fresh.start(agent)

    agent.signal(signal.SIGSTOP)
    with pytest.raises((TimeoutError, urllib.error.URLError)):
        agent.page("/healthz", within_s=2.0)
    agent.signal(signal.SIGCONT)

    assert agent.page("/healthz") == WELL


def test_the_page_says_what_the_peer_socket_says(prefill: AgentProcess) -> None:
    status, said = prefill.page("/status")

    assert status == 200
    assert json.loads(said) == prefill.status()


async def test_the_page_tells_the_story_of_an_offer(prefill: AgentProcess) -> None:
    async with engine(PrefillSession, prefill.attach, make_spec()) as source:
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})
        told = json.loads(prefill.page(f"/status?offer={offer.offer_id}")[1])["story"]
        traced = json.loads(prefill.page(f"/trace?id={offer.offer_id}")[1])["spans"]
        await offer.withdraw()

    assert told == prefill.status(offer_id=offer.offer_id)["story"][: len(told)]
    assert told
    assert traced[0]["name"] == "offer"


def test_a_token_keeps_strangers_out_of_all_but_the_probes(fresh: Started, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    agent = fresh.prefill(http_token_file=str(token))
    fresh.start(agent)
    paths = ("/status", "/metrics")

    assert [agent.page(path, Authorization="")[0] for path in paths] == [401, 401]
    assert [agent.page(path)[0] for path in paths] == [200, 200]
    assert agent.page("/healthz", Authorization="") == WELL
    assert agent.page("/readyz", Authorization="") == WELL
    assert TOKEN not in "\n".join(agent.lines())


def test_a_successor_has_the_port_of_the_agent_that_it_replaced(fresh: Started) -> None:
    first = fresh.prefill()
    fresh.start(first)
    second: AgentProcess = fresh.successor(first)
    fresh.start(second)
    assert first.exit_status() == 0

    wait_until(lambda: second.page("/healthz") == WELL, "the successor serves the page")
    assert json.loads(second.page("/status")[1]) == second.status()
