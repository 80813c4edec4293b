"""Loads of the connector for vLLM with real agents: each is reported, once, at its end.

What vLLM does with the reports is tested with vLLM itself, in tests/vllm.
"""

import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvbus.integrations.vllm import stats
from kvbus.integrations.vllm.loads import Load
from kvbus.integrations.vllm.transfer_params import HandoffParams
from tests.agents import Agents, agents_ended, wait_until
from tests.integrations.vllm_sides import (
    GROUP,
    LOADED_BLOCKS,
    PROMPT_TOKENS,
    both_sides,
    ticket_of,
)

MANY_BLOCKS = 4096
SLOW_READS: dict[str, Any] = {
    "env": {"UCX_TLS": "tcp"},
    "transport": {"slice_bytes": 4096, "slice_descriptors": 1},
}
"""Of agents whose reads need both of them, and take long."""
NUM_RACES = 2000


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns at almost every step."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


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


def test_the_wait_for_blocks_is_in_the_spans_of_a_load(agents: Agents) -> None:
    name = uuid.uuid4().hex
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered(name)
        before = time.monotonic()
        load = Load(name, PROMPT_TOKENS, handoff)
        loading.loads.expect(load)
        given = time.monotonic()
        loading.loads.start(name, LOADED_BLOCKS, loading.loads.matched(name, 0) or 0)
        asked = time.monotonic()
        loading.until(lambda: loading.over, "the load is over")

    spans = {one["name"]: one for one in agents.all[1].trace(fetch_id=load.fetch_id)}
    assert before <= spans["pending"]["start_s"] <= given
    assert given <= spans["asked"]["start_s"] == spans["pending"]["end_s"] <= asked


def test_only_what_the_decode_engine_lacks_is_loaded(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        before = loading.blocks([1])
        loading.load("r", offering.offered("r"), num_local_tokens=16)
        loading.until(lambda: loading.over, "the load is over")

        assert torch.equal(loading.blocks([1]), before)
        assert torch.equal(loading.blocks([2]), offering.blocks([3]))


def test_a_request_that_ends_during_its_load_gets_its_blocks_back_once(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        offering.offers.reserve("r")
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        ticket = ticket_of(offering.offers, "r")
        assert ticket is not None
        loading.load("r", HandoffParams(ticket, PROMPT_TOKENS, ""))  # it is still computed
        loading.loads.give_up("r")
        loading.until(lambda: loading.over, "the load is over")
        loading.step()

        assert (loading.over, loading.failed) == (["r"], [])


def test_params_that_were_refused_fail_the_load_without_a_fetch(agents: Agents) -> None:
    with both_sides(*agents.all) as (_, loading):
        loading.loads.expect(Load("r", PROMPT_TOKENS, None, "kv_transfer_params: no ticket"))
        assert loading.loads.matched("r", 0) == PROMPT_TOKENS
        loading.loads.start("r", [[1, 2, 4]], PROMPT_TOKENS)
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == loading.over == ["r"]
        told = {stats.LOADS: ["failed"], stats.LOADS_FAILED: ["requested"]}
        assert loading.stats.take() == stats.no_figures() | told


def test_a_load_without_an_agent_fails_at_once(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        agents.all[1].kill()
        wait_until(lambda: not loading.control.wait_open(0), "the agent is missed")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == loading.over == ["r"]


def test_no_load_is_over_before_it_has_failed(agents: Agents) -> None:
    """vLLM uses the blocks of a load that is over: a failure that is told later is too late."""
    too_early: list[str] = []
    with both_sides(*agents.all) as (_, loading), switching_often():
        for number in range(NUM_RACES):
            name = f"r{number}"
            loading.loads.expect(Load(name, PROMPT_TOKENS, None, "its params are refused"))
            loading.loads.matched(name, 0)
            loading.loads.start(name, [[1, 2, 4]], PROMPT_TOKENS)
            while not loading.over:
                loading.step()
            too_early += [each for each in loading.over if each not in loading.failed]
            loading.over.clear()

    assert too_early == []


def another_ticket_of(handoff: HandoffParams) -> HandoffParams:
    """To the same offer: a ticket that comes again is not used again."""
    ticket = {**handoff.ticket, "request_id": "another"}
    return HandoffParams(ticket, handoff.remote_num_tokens, handoff.prompt_digest)


def test_a_load_of_an_offer_that_is_gone_fails(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("r")
        loading.load("r", handoff)
        loading.until(lambda: loading.over, "the load is over")
        loading.load("again", another_ticket_of(handoff))
        loading.until(lambda: len(loading.over) > 1, "the second load is over")

        assert (loading.failed, loading.over) == (["again"], ["r", "again"])


@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_that_comes_back_is_used_again(agents: Agents, number: int) -> None:
    with both_sides(*agents.all) as (offering, loading):
        side = (offering, loading)[number]
        agents.all[number].kill()
        wait_until(lambda: not side.is_up(), "the agent is missed")
        agents.all[number].start()
        wait_until(side.is_up, "the engine is registered again")
        loading.load("r", offering.offered("r"))
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == []
        assert torch.equal(loading.blocks([1, 2]), offering.blocks([7, 3]))


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
        agents.all[1].start()
        wait_until(loading.is_up, "the engine is registered again")
        loading.load("t", offering.offered("t"))
        loading.until(lambda: "t" in loading.over, "the next load is over")

        assert sorted(loading.failed) == ["r", "s"]


def test_a_load_that_failed_is_not_over_while_a_read_may_write_into_its_blocks() -> None:
    with agents_ended(Agents) as agents:
        prefill = agents.prepare("prefill", **SLOW_READS)
        decode = agents.prepare("decode", path="direct", **SLOW_READS)
        agents.start(prefill, decode)
        with both_sides(prefill, decode, num_blocks=MANY_BLOCKS, fetch_timeout_s=5.0) as (
            offering,
            loading,
        ):
            blocks = list(range(1, MANY_BLOCKS))
            first = blocks[:64]
            handoff = offering.offered("r", len(blocks) * GROUP.block_size, [blocks[::-1]])
            before = loading.blocks(first)
            loading.load("r", handoff, block_ids=[blocks])
            wait_until(lambda: not torch.equal(loading.blocks(first), before), "it is read")
            prefill.signal(signal.SIGSTOP)
            loading.until(lambda: loading.failed or loading.over, "the load has failed")
            loading.step()
            over_too_soon = list(loading.over)
            prefill.signal(signal.SIGCONT)
            loading.until(lambda: loading.over, "the load is over")

            assert over_too_soon == []
            assert (loading.over, loading.failed) == (["r"], ["r"])


@pytest.mark.parametrize(("digest", "loaded"), [("prompt", True), ("another prompt", False)])
def test_a_load_is_of_the_prompt_that_the_ticket_is_of(
    agents: Agents, digest: str, loaded: bool
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        offering.offers.reserve("r", lambda: "prompt")
        offered = offering.offered("r")
        loading.load("r", HandoffParams(offered.ticket, PROMPT_TOKENS, digest))
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == ([] if loaded else ["r"])
        offering.until(lambda: offering.sent, "the blocks came back")


def test_a_load_that_failed_is_told_with_all_ids_of_its_request(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        handoff = offering.offered("known-to-agents")
        loading.load("of-the-decode-vllm", HandoffParams(handoff.ticket, 4 * PROMPT_TOKENS, ""))
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == ["of-the-decode-vllm"]
        (line,) = [one.getMessage() for one in caplog.records if "not loaded" in one.getMessage()]
        assert "request of-the-decode-vllm ('known-to-agents' in the prefill vLLM, fetch " in line
