"""Offers of the connector for vLLM with real agents: one for each request, and its blocks once."""

import signal
import uuid
from functools import partial
from typing import Any

import pytest
import torch

from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm import offers, stats
from kvbus.integrations.vllm.block_tables import Tables, tables_of
from kvbus.integrations.vllm.growing import Ready
from kvbus.integrations.vllm.offers import Offers
from kvbus.integrations.vllm.request_ids import agents_id
from kvbus.integrations.vllm.reservations import State
from kvbus.integrations.vllm.sessions import control_link
from kvbus.integrations.vllm.stats import StatsRecorder
from kvbus.integrations.vllm.transfer_params import HandoffParams
from tests.agents import Agents, wait_until
from tests.integrations.vllm_sides import (
    BLOCKS,
    GROUP,
    LOADED_BLOCKS,
    PROMPT_TOKENS,
    both_sides,
    memory_of,
    side_of,
    ticket_of,
)

SHORT_WAIT_S, FOR_EVER_S = 0.1, 1e6


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
    with both_sides(*agents.all, ttl_s=5.0) as (offering, loading):
        loading.load("before", offering.offered("before"))  # the agents meet, which takes a while
        loading.until(lambda: loading.over, "the agents know each other")
        offering.offers.reserve("r")
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        expiring = ticket_of(offering.offers, "r")
        offering.until(
            lambda: ticket_of(offering.offers, "r") not in (None, expiring),
            "another ticket is there",
        )
        loading.load("r", offering.offered("r"))
        loading.until(lambda: "r" in loading.over, "the load is over")

        assert "r" not in loading.failed


def test_an_offer_that_nobody_reads_comes_back_when_it_expires(agents: Agents) -> None:
    with both_sides(*agents.all, ttl_s=2.0) as (offering, _):
        offering.offered("r")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert offering.sent == ["r"]


def test_tokens_that_do_not_lie_in_the_blocks_are_not_offered(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, _):
        offering.offers.reserve("r")
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")

        assert offering.offers.publish("r", BLOCKS, 100) is None
        agents.all[0].says("offer.released", outcome="withdrawn")


def test_a_request_is_offered_however_long_its_id_is(agents: Agents) -> None:
    request_id = "___prefill_addr_" + 2000 * "a"
    with both_sides(*agents.all) as (offering, loading):
        loading.load(request_id, offering.offered(request_id))
        loading.until(lambda: loading.over, "the load is over")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert not loading.failed
        assert offering.sent == [agents_id(request_id)]
        agents.all[0].says("offer.released", request_id=agents_id(request_id))


def grown(num_tokens: int) -> Ready:
    return Ready("r", num_tokens, BLOCKS)


def test_who_knows_the_name_of_an_offer_reads_it_while_it_grows(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        name = loading.meet("r", agents.all[0])
        reservation = offering.offers.reserve("r", transfer_id=name)
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        for num_tokens in (5, 16, 17, 39):
            offering.offers.grow(grown(num_tokens))
        offering.until(lambda: reservation.told == {GROUP.name: 3}, "it has grown")
        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is not None
        loading.until(lambda: loading.over, "the load is over")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert not loading.failed
        ours, theirs = loading.blocks(LOADED_BLOCKS[0]), offering.blocks(BLOCKS[0])
        in_last = PROMPT_TOKENS % GROUP.block_size
        assert torch.equal(ours[:, :-1], theirs[:, :-1])
        assert torch.equal(ours[:, -1, :in_last], theirs[:, -1, :in_last])
        (ended,) = agents.all[0].says("offer.released", outcome="completed")
        story = agents.all[0].status(offer_id=ended["offer_id"])["story"]
        assert sum("Extended" in step for step in story) == 5


def test_what_the_reader_gives_up_is_not_offered(agents: Agents) -> None:
    with both_sides(*agents.all) as (offering, loading):
        name = loading.meet("r", agents.all[0])
        offering.offers.reserve("r", transfer_id=name)
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        offering.offers.grow(grown(16))
        loading.loads.give_up("r")
        loading.until(lambda: loading.over, "the load is over")
        agents.all[0].says("offer.released", outcome="withdrawn")
        offering.until(
            lambda: offering.offers.reserve("r").state is State.UNWANTED, "the engine knows"
        )

        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is None
        offering.step()
        assert offering.sent == []


def test_what_the_reader_gives_up_while_it_is_published_comes_back(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        name = loading.meet("r", agents.all[0])
        reservation = offering.offers.reserve("r", transfer_id=name)
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")

        def tables_once_given_up(*args: Any) -> Tables:
            loading.loads.give_up("r")
            loading.until(lambda: loading.over, "the load is over")
            wait_until(lambda: reservation.state is State.UNWANTED, "the engine knows")
            return tables_of(*args)

        monkeypatch.setattr(offers, "tables_of", tables_once_given_up)
        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is not None
        offering.until(lambda: offering.sent, "the blocks came back")

        assert offering.sent == ["r"]


def test_what_the_reader_has_given_up_before_is_not_offered(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        name = loading.meet("r", agents.all[0])
        wait_until(lambda: agents.all[0].metric("awaited_offers") == 1, "it is waited for")
        loading.loads.give_up("r")
        loading.until(lambda: loading.over, "the load is over")
        wait_until(lambda: agents.all[0].metric("awaited_offers") == 0, "it is forgone")
        agents.check()
        reservation = offering.offers.reserve("r", transfer_id=name)
        offering.until(lambda: reservation.state is State.UNWANTED, "the engine knows")

        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is None
        assert "not offered" not in caplog.text


def test_an_offer_that_the_agent_has_refused_says_why(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    with both_sides(*agents.all) as (offering, _):
        name = uuid.uuid4().hex
        offering.offers.reserve("r", transfer_id=name)
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        offering.offers.reserve("again", transfer_id=name)

        assert offering.offers.publish("again", BLOCKS, PROMPT_TOKENS) is None
        (line,) = (one.getMessage() for one in caplog.records if one.levelname == "ERROR")
        assert "request again: its KV is not offered" in line
        assert line.endswith("an offer with this transfer_id was made before [offer_exists]")


def test_a_request_that_is_preempted_is_not_read_any_more(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        name = loading.meet("r", agents.all[0])
        reservation = offering.offers.reserve("r", transfer_id=name)
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        offering.offers.grow(grown(16))
        offering.offers.take_back("r")
        loading.until(lambda: loading.over, "the load is over")

        assert loading.failed == ["r"]
        assert "[offer_withdrawn, stage " in caplog.text
        assert reservation.state is State.UNWANTED
        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is None


def test_an_offer_that_has_lost_its_name_keeps_nothing_of_a_preempted_request(
    agents: Agents,
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        reservation = offering.offers.reserve("r", transfer_id=uuid.uuid4().hex)
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        agents.all[0].kill()
        wait_until(lambda: reservation.transfer_id is None, "its end is known")
        agents.all[0].start()
        offering.until(lambda: ticket_of(offering.offers, "r"), "there is another")
        named = offering.offers.reserve("named", transfer_id=uuid.uuid4().hex)
        offering.until(lambda: ticket_of(offering.offers, "named"), "a ticket is there")
        for name in ("r", "named"):
            offering.offers.grow(Ready(name, 16, LOADED_BLOCKS))
        wait_until(lambda: named.told, "both were told of")
        offering.offers.abandon("named")
        offering.offers.take_back("r")
        ticket = offering.offers.publish("r", BLOCKS, PROMPT_TOKENS)
        assert ticket is not None
        loading.load("s", HandoffParams(ticket, PROMPT_TOKENS, ""))
        loading.until(lambda: loading.over, "it was loaded")

        assert not loading.failed
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
        agents.all[0].start()
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")

        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is not None


def test_a_ticket_that_is_there_when_the_agent_is_replaced_is_good_and_the_next_is_of_the_other(
    agents: Agents,
) -> None:
    prefill, successor = agents.all[0], agents.successor(agents.all[0])
    agents.all.remove(successor)
    try:
        with both_sides(*agents.all) as (offering, loading):
            offering.offers.reserve("r")
            offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
            ticket, session = ticket_of(offering.offers, "r"), offering.control.session
            agents.start(successor)
            wait_until(lambda: offering.control.session is not session, "the engine went over")

            assert ticket_of(offering.offers, "r") == ticket
            later = offering.offered("s")
            assert later.ticket["agent_boot"] == successor.started["boot_id"]
            made = offering.offers.publish("r", BLOCKS, PROMPT_TOKENS)
            assert made is not None
            for name, handoff in ("r", HandoffParams(made, PROMPT_TOKENS, "")), ("s", later):
                loading.load(name, handoff)
                loading.until(partial(loading.over.__contains__, name), f"{name} was loaded")
            assert not loading.failed
            assert prefill.exit_status() == 0
    finally:
        successor.ask_to_end()
        successor.end()


def test_a_request_that_comes_just_before_its_agent_is_offered_once(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, spec = agents.all[0], EngineSpec("p", "model", 1, (GROUP,))
    link = control_link(prefill.attach, spec, ())

    def reserve(_: object) -> None:
        made.reserve("r")

    link.when_open(reserve)
    made = Offers(spec, link, StatsRecorder(), ttl_s=None)
    try:
        with memory_of(prefill.attach, spec):  # without it the link is not up
            wait_until(lambda: ticket_of(made, "r"), "the ticket is there")
            made.reserve("s")
            wait_until(lambda: ticket_of(made, "s"), "what was asked for before was answered")

            assert "already offered" not in caplog.text
    finally:
        link.close()


def test_an_engine_waits_once_for_an_agent_that_hangs(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with both_sides(*agents.all) as (offering, _):
        offering.offers.reserve("before")
        offering.until(lambda: ticket_of(offering.offers, "before"), "the ticket is there")
        agents.all[0].signal(signal.SIGSTOP)
        offering.offers.reserve("waits")
        monkeypatch.setattr(offers, "TICKET_WITHIN_S", SHORT_WAIT_S)
        assert offering.offers.publish("waits", BLOCKS, PROMPT_TOKENS) is None
        monkeypatch.setattr(offers, "TICKET_WITHIN_S", FOR_EVER_S)
        offering.offers.publish("before", BLOCKS, PROMPT_TOKENS)
        offering.offers.reserve("does not wait")

        assert offering.offers.publish("does not wait", BLOCKS, PROMPT_TOKENS) is None
        assert "timeout" not in caplog.text  # of what was asked for
        agents.all[0].signal(signal.SIGCONT)
        offering.offers.reserve("after")
        offering.until(lambda: ticket_of(offering.offers, "after"), "it answers again")
        offering.offers.reserve("waits again")
        assert offering.offers.publish("waits again", BLOCKS, PROMPT_TOKENS) is not None


def test_a_ticket_that_expires_while_it_is_published_leaves_no_offer(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expired() -> int:
        return len(agents.all[0].logged("offer.released", outcome="expired"))

    def tables_after_expiry(*args: Any) -> Tables:
        before = expired()
        wait_until(lambda: expired() > before, "the ticket has expired")
        wait_until(lambda: agents.all[0].status()["counts"]["offers"], "another one is made")
        return tables_of(*args)

    with both_sides(*agents.all, ttl_s=3.0) as (offering, _):
        offering.offers.reserve("r")
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        monkeypatch.setattr(offers, "tables_of", tables_after_expiry)
        assert offering.offers.publish("r", BLOCKS, PROMPT_TOKENS) is not None
        offering.until(lambda: offering.sent, "the blocks came back")

        assert offering.sent == ["r"]
        agents.all[0].says("offer.released", outcome="withdrawn")


def test_of_the_sequences_of_a_prompt_only_the_one_that_ended_last_is_offered(
    agents: Agents,
) -> None:
    with both_sides(*agents.all) as (offering, loading):
        sequences = [f"{number}_chatcmpl-a" for number in range(3)]
        for number, sequence in enumerate(sequences):
            last = offering.offered(sequence, block_ids=[[3 * number + at for at in (1, 2, 3)]])
        other = offering.offered("0_chatcmpl-b", block_ids=[[20, 21, 22]])

        offering.until(lambda: len(offering.sent) >= 2, "the first ones came back")
        loading.load("r", last)
        loading.load("s", other)
        loading.until(lambda: len(loading.over) == 2, "both loads are over")
        offering.until(lambda: len(offering.sent) == 4, "all came back")

        assert offering.sent[:2] == sequences[:2]
        assert not loading.failed
        assert (offering.stats.take() or {})[stats.OFFERS_FAILED] == []
        agents.check()


def test_a_ticket_for_two_readers_is_good_at_two_decode_engines(agents: Agents) -> None:
    prefill, decode = agents.all
    with (
        both_sides(prefill, decode) as (offering, one),
        side_of(decode.attach, "other") as other,
    ):
        wait_until(other.is_up, "the other engine is registered")
        handoff = offering.offered("r", readers=2)

        for loading in (one, other):
            loading.load("r", handoff)
            loading.until(partial(bool, loading.over), "the load is over")
        offering.until(lambda: offering.sent, "the blocks came back")

        assert not one.failed + other.failed
        assert torch.equal(other.blocks([1, 2]), offering.blocks([7, 3]))
        agents.check()
