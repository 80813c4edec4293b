"""Offers that a decode engine does not need are released, with real agents."""

import signal

import pytest
import torch

from kvbus.integrations.vllm import loads
from kvbus.integrations.vllm.block_tables import NULL_BLOCK
from kvbus.integrations.vllm.loads import Load
from tests.agents import Agents, wait_until
from tests.integrations.vllm_sides import NUM_BLOCKS, PROMPT_TOKENS, both_sides


def test_a_full_prefix_hit_only_releases_the_offer(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        before = loading.blocks([1, 2, 4])
        loading.load("r", offering.offered("r"), num_local_tokens=PROMPT_TOKENS)
        offering.until(lambda: offering.sent, "the blocks came back")
        loading.step()

        assert torch.equal(loading.blocks([1, 2, 4]), before)
        assert loading.over == loading.failed == []
        agents.all[0].says("offer.released", outcome="completed")


def test_a_request_that_ends_before_its_load_began_releases_the_offer(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        loading.loads.expect(Load("r", PROMPT_TOKENS, offering.offered("r")))
        loading.loads.give_up("r")
        offering.until(lambda: offering.sent, "the blocks came back")

        agents.all[0].says("offer.released", outcome="completed")


def test_a_request_that_ends_during_its_load_releases_the_offer(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        agents.all[0].signal(signal.SIGSTOP)
        loading.load("r", handoff)
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"], "the fetch has begun")
        loading.loads.give_up("r")
        loading.until(lambda: loading.over, "the load is over")
        agents.all[0].signal(signal.SIGCONT)
        offering.until(lambda: offering.sent, "the blocks came back")

        agents.all[0].says("offer.released", outcome="completed")


def test_an_offer_whose_load_failed_is_released(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        loading.loads.expect(Load("r", PROMPT_TOKENS, handoff))
        loading.loads.matched("r", 0)
        loading.loads.start("r", [[1, 2, NUM_BLOCKS]], PROMPT_TOKENS)
        loading.until(lambda: loading.over, "the load is over")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert loading.failed == ["r"]


def test_an_offer_whose_blocks_vllm_lacks_is_released(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        loading.load("r", offering.offered("r"), block_ids=[[1, NULL_BLOCK, 4]])
        loading.until(lambda: loading.over, "the load is over")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert loading.failed == ["r"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told"])
def test_an_offer_that_no_agent_could_load_is_released_by_the_one_that_comes(
    agents: Agents, number: signal.Signals
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        agents.all[1].signal(number)
        agents.all[1].exit_status()
        wait_until(lambda: not loading.is_up(), "the agent is missed")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")
        agents.all[1].start()
        offering.until(lambda: offering.sent, "the blocks came back")

        agents.all[0].says("offer.released", outcome="completed")


def test_a_release_that_its_agent_did_not_survive_is_done_by_the_next_one(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        agents.all[0].signal(signal.SIGSTOP)
        loading.loads.expect(Load("r", PROMPT_TOKENS, handoff))
        loading.loads.give_up("r")
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"], "the release has begun")
        agents.all[1].kill()
        wait_until(lambda: not loading.is_up(), "the agent is missed")
        agents.all[0].signal(signal.SIGCONT)
        agents.all[1].start()
        offering.until(lambda: offering.sent, "the blocks came back")

        agents.all[0].says("offer.released", outcome="completed")


def test_what_a_draining_agent_does_not_release_is_released_by_the_next_one(
    agents: Agents,
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoffs = {name: offering.offered(name) for name in ("r", "s")}
        agents.all[0].signal(signal.SIGSTOP)
        loading.load("r", handoffs["r"])
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"], "the fetch has begun")
        agents.all[1].signal(signal.SIGTERM)
        wait_until(lambda: agents.all[1].status()["draining"], "it drains")
        loading.load("s", handoffs["s"])
        loading.until(lambda: "s" in loading.over, "it takes nothing new")
        agents.all[0].signal(signal.SIGCONT)
        agents.all[1].exit_status()
        agents.all[1].start()
        offering.until(lambda: len(offering.sent) == len(handoffs), "the blocks came back")

        assert "s" in loading.failed


def test_releases_that_wait_for_each_other_are_all_done(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "MAX_UNDER_WAY", 1)
    names = ["r", "s", "t", "u"]
    with both_sides(*agents.all) as (offering, loading):
        handoffs = {name: offering.offered(name) for name in names}
        agents.all[1].kill()
        wait_until(lambda: not loading.is_up(), "the agent is missed")
        for name, handoff in handoffs.items():
            loading.load(name, handoff)
        loading.until(lambda: len(loading.over) == len(names), "the loads are over")
        agents.all[1].start()
        offering.until(lambda: len(offering.sent) == len(names), "the blocks came back")

        assert sorted(offering.sent) == names
