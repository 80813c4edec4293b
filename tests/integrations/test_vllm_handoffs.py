"""Loads and offers of the connector for vLLM with real agents: each is reported, once, at its end.

What vLLM does with the reports is tested with vLLM itself, in tests/vllm.
"""

import signal

import pytest
import torch

from kvbus.integrations.vllm import tally
from kvbus.integrations.vllm.block_tables import NULL_BLOCK
from kvbus.integrations.vllm.contract import HandoffParams
from kvbus.integrations.vllm.loads import Load
from tests.agents import Agents, agents_ended, wait_until
from tests.integrations.vllm_sides import (
    BLOCKS,
    GROUP,
    NUM_BLOCKS,
    PROMPT_TOKENS,
    both_sides,
    side_of,
)

MANY_BLOCKS = 512
SLOW_READS = {
    "env": {"UCX_TLS": "tcp"},
    "transport": {"slice_bytes": 4096, "slice_descriptors": 1},
}
"""Of agents whose reads need both of them, and take long."""


def test_what_was_offered_is_loaded_and_both_sides_hear_of_it_once(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        loading.load("r", offering.offered("r"))
        loading.until(lambda: loading.over, "the load is over")
        offering.until(lambda: offering.sent, "the blocks came back")
        loading.step()
        offering.step()

        whole, rest = loading.blocks([1, 2]), loading.blocks([4])[:, :, :8]
        assert torch.equal(whole, offering.blocks([7, 3]))
        assert torch.equal(rest, offering.blocks([9])[:, :, :8])
        assert (loading.over, loading.failed, offering.sent) == (["r"], [], ["r"])
        agents.check()


def test_only_what_the_decode_engine_lacks_is_loaded(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        before = loading.blocks([1])
        loading.load("r", offering.offered("r"), num_local_tokens=16)
        loading.until(lambda: loading.over, "the load is over")

        assert torch.equal(loading.blocks([1]), before)
        assert torch.equal(loading.blocks([2]), offering.blocks([3]))


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


def test_a_request_that_ends_during_its_load_gets_its_blocks_back_once(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        offering.offers.reserve("r")
        offering.until(lambda: offering.offers.ticket("r"), "the ticket is there")
        ticket = offering.offers.ticket("r")
        assert ticket is not None
        loading.load("r", HandoffParams(ticket, PROMPT_TOKENS, ""))  # it is still computed
        loading.loads.give_up("r")
        loading.until(lambda: loading.over, "the load is over")
        loading.step()

        assert (loading.over, loading.failed) == (["r"], [])


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


def test_params_that_were_refused_fail_the_load_without_a_fetch(agents: Agents) -> None:
    with both_sides(*agents.all) as (_, loading):
        loading.loads.expect(Load("r", PROMPT_TOKENS, None, "kv_transfer_params: no ticket"))
        assert loading.loads.matched("r", 0) == PROMPT_TOKENS
        loading.loads.start("r", [[1, 2, 4]], PROMPT_TOKENS)
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == loading.over == ["r"]
        assert loading.tally.take() == {**tally.no_figures(), tally.LOADS_FAILED: ["invalid"]}


def test_a_load_without_an_agent_fails_at_once(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        agents.all[1].kill()
        wait_until(lambda: not loading.control.wait_up(0), "the agent is missed")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == loading.over == ["r"]


def test_an_offer_that_no_agent_could_load_is_released_by_the_one_that_comes(
    agents: Agents,
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        agents.all[1].kill()
        wait_until(lambda: not loading.is_up(), "the agent is missed")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")
        agents.all[1].restart()
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
        agents.all[1].restart()
        offering.until(lambda: offering.sent, "the blocks came back")

        agents.all[0].says("offer.released", outcome="completed")


def test_a_load_of_an_offer_that_is_gone_fails(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")
        loading.load("again", handoff)
        loading.until(lambda: len(loading.over) > 1, "the second load is over")

        assert (loading.failed, loading.over) == (["again"], ["r", "again"])


def test_a_prefill_engine_with_a_decode_agent_says_so_and_offers_nothing(agents: Agents) -> None:
    with side_of(agents.all[1].attach, "p") as side:
        wait_until(side.is_up, "the engine is registered")
        side.offers.reserve("r")

        assert side.offers.publish("r", BLOCKS, PROMPT_TOKENS) is None


def test_without_an_agent_nothing_is_offered_and_no_block_is_held(agents: Agents) -> None:
    agents.all[0].kill()
    with side_of(agents.all[0].attach, "p") as side:
        side.offers.reserve("r")

        assert side.offers.publish("r", BLOCKS, PROMPT_TOKENS) is None
        side.step()
        assert side.sent == []


def test_an_abandoned_reservation_leaves_nothing_in_the_agent(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, _):
        offering.offers.reserve("r")
        offering.offers.abandon("r")
        agents.all[0].says("offer.released", outcome="withdrawn")

        agents.check()


def test_a_ticket_that_expires_while_its_request_is_computed_is_replaced(agents: Agents) -> None:
    with both_sides(*agents.all, ttl_s=2.0) as (offering, loading):
        offering.offers.reserve("r")
        agents.all[0].says("offer.released", outcome="expired")
        loading.load("r", offering.offered("r"))
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == []


def test_an_offer_that_nobody_reads_comes_back_when_it_expires(agents: Agents) -> None:
    with both_sides(*agents.all, ttl_s=0.2) as (offering, _):
        offering.offered("r")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert offering.sent == ["r"]


def test_tokens_that_do_not_lie_in_the_blocks_are_not_offered(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, _):
        offering.offers.reserve("r")
        offering.until(lambda: offering.offers.ticket("r"), "the ticket is there")

        assert offering.offers.publish("r", BLOCKS, 100) is None
        agents.all[0].says("offer.released", outcome="withdrawn")


@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_that_comes_back_is_used_again(agents: Agents, number: int) -> None:
    with both_sides(*agents.all) as (offering, loading):
        side = (offering, loading)[number]
        agents.all[number].kill()
        wait_until(lambda: not side.is_up(), "the agent is missed")
        agents.all[number].restart()
        wait_until(side.is_up, "the engine is registered again")
        loading.load("r", offering.offered("r"))
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == []
        assert torch.equal(loading.blocks([1, 2]), offering.blocks([7, 3]))


def test_blocks_come_back_when_the_prefill_agent_is_gone(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, _):
        offering.offered("r")
        agents.all[0].kill()
        offering.until(lambda: offering.sent, "the blocks came back")

        assert offering.sent == ["r"]


def test_a_request_that_waits_for_its_ticket_gets_one_of_the_agent_that_came_back(
    agents: Agents,
) -> None:
    with both_sides(*agents.all) as (offering, _):
        agents.all[0].kill()
        wait_until(lambda: not offering.is_up(), "the agent is missed")
        offering.offers.reserve("r")
        agents.all[0].restart()
        offering.until(lambda: offering.offers.ticket("r"), "the ticket is there")

        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is not None


def test_a_decode_agent_that_ends_during_loads_fails_them_and_is_used_again(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoffs = {name: offering.offered(name) for name in ("r", "s")}
        agents.all[0].signal(signal.SIGSTOP)
        for name, handoff in handoffs.items():
            loading.load(name, handoff)
        wait_until(lambda: agents.all[1].status()["counts"]["fetches"] == 2, "both have begun")
        agents.all[1].kill()
        agents.all[0].signal(signal.SIGCONT)
        loading.until(lambda: len(loading.over) == 2, "both loads are over")
        agents.all[1].restart()
        wait_until(loading.is_up, "the engine is registered again")
        loading.load("t", offering.offered("t"))
        loading.until(lambda: "t" in loading.over, "the next load is over")

        assert sorted(loading.failed) == ["r", "s"]


def test_a_load_that_failed_is_not_over_while_a_read_may_write_into_its_blocks() -> None:
    with agents_ended(Agents) as agents:
        prefill = agents.prepare("prefill", **SLOW_READS)
        decode = agents.prepare("decode", path="direct", **SLOW_READS)
        agents.start(prefill, decode)
        with both_sides(prefill, decode, num_blocks=MANY_BLOCKS) as (offering, loading):
            blocks = list(range(1, MANY_BLOCKS))
            handoff = offering.offered("r", len(blocks) * GROUP.block_size, [blocks[::-1]])
            before = loading.blocks(blocks)
            loading.load("r", handoff, block_ids=[blocks])
            wait_until(lambda: not torch.equal(loading.blocks(blocks), before), "it is read")
            prefill.signal(signal.SIGSTOP)
            loading.until(lambda: loading.failed or loading.over, "the load has failed")
            loading.step()
            over_too_soon = list(loading.over)
            prefill.signal(signal.SIGCONT)
            loading.until(lambda: loading.over, "the load is over")

            assert over_too_soon == []
            assert (loading.over, loading.failed) == (["r"], ["r"])
