"""What routers carry between two vLLMs."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import prompt_digest
from kvbus.errors import ProtocolError
from kvbus.geometry import BlockTable
from kvbus.integrations.vllm.params import (
    HandoffParams,
    read_offer_params,
    read_params,
    read_trace,
)
from kvbus.protocol import Ticket

TICKET = Ticket(
    "agent", "boot", "tcp://127.0.0.1:1", "engine", "boot", "offer", "request", 0, 32 * "0"
)


def params() -> dict[str, Any]:
    return HandoffParams(TICKET.to_json(), 40, prompt_digest([1, 2], [])).to_params()


def test_params_travel_as_json_and_come_back_equal() -> None:
    carried = json.loads(json.dumps(params()))

    assert read_params(carried).to_params() == params()


def test_params_that_the_connector_wrote_in_an_older_vllm_are_those_of_their_prompt() -> None:
    """As between servers of unlike versions; they were written down in vLLM 0.32.0."""
    written = json.loads(Path(__file__).with_name("vllm_params.json").read_text())

    handoff = read_params(written["params"])

    no_lora = ""
    assert handoff.remote_num_tokens == len(written["prompt"])
    assert handoff.prompt_digest == prompt_digest(written["prompt"], [no_lora])
    assert Ticket.from_json(handoff.ticket).tables() == {"full": BlockTable.of([7, 3, 9])}


def test_what_a_router_or_an_engine_adds_is_no_reason_to_refuse_params() -> None:
    assert read_params({**params(), "remote_prefill_cached_tokens": 0}).remote_num_tokens == 40


@pytest.mark.parametrize("readers", [0, 257, "2", 1.5])
def test_a_ticket_is_for_one_reader_or_the_routers_number_and_another_is_refused(
    readers: object,
) -> None:
    assert [read_offer_params(said).readers for said in ({}, {"readers": 3})] == [1, 3]
    with pytest.raises(ProtocolError, match="readers"):
        read_offer_params({"readers": readers})


def test_the_trace_of_a_request_is_that_of_its_headers_or_of_the_router() -> None:
    headers, routers = (f"00-{letter * 32}-{letter * 16}-01" for letter in "ab")

    assert read_trace({"traceparent": routers}, {"traceparent": headers}) == headers
    assert read_trace({"traceparent": routers}, None) == routers
    assert read_trace({"traceparent": routers}, {"traceparent": "wrong"}) == routers
    assert read_trace({"traceparent": 7}, {}) == ""
    assert read_trace({}, None) == ""
