"""Tickets in which the connector for vLLM names the blocks: they are read before the lease."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvbus.integrations.vllm.transfer_params import HandoffParams
from kvbus.protocol import Ticket
from tests.agents import AgentProcess, Agents, agents_ended
from tests.integrations.conftest import PATIENT_S
from tests.integrations.vllm_sides import BLOCKS, PROMPT_TOKENS, Side, both_sides, ticket_of

TTL_S = 5.0
"""Of an offer that is asked for within it, and one that is to expire."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Two agents as on two machines, a reader of mapped memory, and two that sign tickets."""
    key = tmp_path_factory.mktemp("keys") / "ticket.key"
    key.touch(mode=0o600)
    key.write_bytes(b"k" * 32)
    patient: dict[str, Any] = {"request_timeout_s": PATIENT_S}
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill"),
            agents.prepare("decode", **patient),
            agents.prepare("decode", mapped=True, **patient),
            agents.prepare("prefill", ticket_keys=[str(key)]),
            agents.prepare("decode", ticket_keys=[str(key)], **patient),
            agents.prepare("prefill", ticket_blocks=2),
        )
        yield agents


@pytest.fixture
def agents(site: Agents) -> Iterator[Agents]:
    """They hold nothing after each test."""
    for agent in site.all:
        agent.skip_log()
    yield site
    site.check()


def hand_over(offering: Side, loading: Side, request_id: str) -> Ticket:
    """One request, whose KV is right in the end; returns its ticket."""
    handoff = offering.offered(request_id)
    loading.load(request_id, handoff)
    see_it_arrive(offering, loading, request_id)
    return Ticket.from_json(handoff.ticket)


def see_it_arrive(offering: Side, loading: Side, request_id: str) -> None:
    loading.until(lambda: request_id in loading.over, "the load is over")
    offering.until(lambda: request_id in offering.sent, "the blocks came back")

    assert loading.failed == []
    whole, rest = loading.blocks([1, 2]), loading.blocks([4])[:, :, :8]
    assert torch.equal(whole, offering.blocks([7, 3]))
    assert torch.equal(rest, offering.blocks([9])[:, :, :8])


def lines_of(decode: AgentProcess, request_id: str) -> dict[str, Any]:
    (line,) = decode.says("handoff.completed", request_id=request_id)
    return line


@pytest.mark.parametrize(("reader", "path"), [(1, "direct"), (2, "mapped")])
def test_what_the_connector_named_is_read_before_the_lease_once_the_agents_have_met(
    agents: Agents, reader: int, path: str
) -> None:
    prefill, decode = agents.all[0], agents.all[reader]
    with both_sides(prefill, decode) as (offering, loading):
        tickets = [hand_over(offering, loading, f"r{n}") for n in range(3)]

    named = [ticket.tables()["full"].array().tolist() for ticket in tickets]
    assert named == [BLOCKS[0]] * 3
    assert [ticket.num_tokens for ticket in tickets] == [PROMPT_TOKENS] * 3
    lines = [lines_of(decode, f"r{n}") for n in range(3)]
    assert [line["path"] for line in lines] == [path] * 3
    assert [line["ahead"] for line in lines] == [False, True, True]


@pytest.mark.parametrize("reader", [1, 2], ids=["direct", "mapped"])
def test_a_load_that_is_faster_than_the_seal_is_over_after_the_seal(
    agents: Agents, reader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = agents.all[0], agents.all[reader]
    kept: list[Callable[[Any], None]] = []
    with both_sides(prefill, decode) as (offering, loading):
        hand_over(offering, loading, "before")
        with monkeypatch.context() as patch:
            offering.offers.reserve("r")
            offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
            patch.setattr(offering.control, "post", kept.append)
            ticket = offering.offers.publish("r", BLOCKS, PROMPT_TOKENS)
        assert ticket is not None
        loading.load("r", HandoffParams(ticket, PROMPT_TOKENS, ""))
        prefill.says("request.refused", op="take", code="offer_open", level="info")
        loading.step()
        assert loading.over == ["before"]

        offering.control.post(kept[0])
        see_it_arrive(offering, loading, "r")

    assert lines_of(decode, "r")["ahead"]


def test_a_load_outlasts_the_time_to_live_of_an_offer_whose_seal_is_late(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = agents.all[0], agents.all[2]
    kept: list[Callable[[Any], None]] = []
    with both_sides(prefill, decode) as (offering, loading):
        hand_over(offering, loading, "before")
        with monkeypatch.context() as patch:
            offering.offers.reserve("r", ttl_s=TTL_S)
            offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
            patch.setattr(offering.control, "post", kept.append)
            ticket = offering.offers.publish("r", BLOCKS, PROMPT_TOKENS)
        assert ticket is not None
        loading.load("r", HandoffParams(ticket, PROMPT_TOKENS, ""))
        prefill.says("request.refused", op="take", code="offer_open", level="info")
        offering.offers.reserve("later", ttl_s=TTL_S)
        prefill.says("offer.released", request_id="later", outcome="expired")
        offering.offers.abandon("later")

        offering.control.post(kept[0])
        see_it_arrive(offering, loading, "r")


def test_a_load_whose_request_is_withdrawn_in_place_of_the_seal_fails(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = agents.all[:2]
    with both_sides(prefill, decode) as (offering, loading):
        hand_over(offering, loading, "before")
        offering.offers.reserve("r")
        offering.until(lambda: ticket_of(offering.offers, "r"), "the ticket is there")
        offer = offering.offers.reserve("r").offer
        assert offer is not None
        ticket = offer.ticket_naming(PROMPT_TOKENS, {"full": BLOCKS[0]})
        loading.load("r", HandoffParams(ticket, PROMPT_TOKENS, ""))
        prefill.says("request.refused", op="take", code="offer_open", level="info")

        offering.offers.abandon("r")
        loading.until(lambda: "r" in loading.over, "the load is over")

        assert loading.failed == ["r"]
        decode.says("handoff.failed", request_id="r", code="offer_withdrawn")


def test_a_signed_ticket_names_no_blocks_and_is_claimed_first(agents: Agents) -> None:
    prefill, decode = agents.all[3:5]
    with both_sides(prefill, decode) as (offering, loading):
        tickets = [hand_over(offering, loading, f"r{n}") for n in range(2)]

    assert [ticket.blocks for ticket in tickets] == ["", ""]
    assert [lines_of(decode, f"r{n}")["ahead"] for n in range(2)] == [False, False]


def test_more_blocks_than_the_prefill_agent_allows_are_not_named(agents: Agents) -> None:
    with both_sides(agents.all[5], agents.all[1]) as (offering, loading):
        ticket = hand_over(offering, loading, "r")

    assert ticket.blocks == ""
