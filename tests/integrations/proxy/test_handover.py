"""What each server is asked for, and what the client gets, when all goes well."""

from typing import Any

import pytest

from tests.integrations.proxy.conftest import Logs, StartEngine, StartProxy
from tests.integrations.proxy.engines import TICKET, Engine, offers, says

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0.0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hé"}], "max_tokens": 40}


def test_the_prefill_server_is_asked_for_one_token_and_a_ticket(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 9}

    proxy([prefill], [decode]).post("/v1/completions", json=asked)

    assert prefill.bodies == [
        {
            **ASKED,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True},
        }
    ]


def test_the_decode_server_gets_the_request_and_the_ticket_as_it_came(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 9}

    proxy([prefill], [decode]).post("/v1/completions", json=asked)

    assert decode.bodies == [{**asked, "kv_transfer_params": TICKET}]


def test_a_chat_with_max_completion_tokens_is_prefilled_for_one_token(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    asked = {**CHAT, "max_completion_tokens": 30}

    proxy([prefill], [decode]).post("/v1/chat/completions", json=asked)

    assert prefill.asked[0].path == decode.asked[0].path == "/v1/chat/completions"
    assert (prefill.bodies[0]["max_tokens"], prefill.bodies[0]["max_completion_tokens"]) == (1, 1)
    assert decode.bodies[0]["max_completion_tokens"] == 30


def test_a_key_that_the_client_did_not_send_is_not_invented(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    proxy([prefill], [decode]).post("/v1/chat/completions", json=CHAT)

    assert "max_completion_tokens" not in prefill.bodies[0]
    assert decode.bodies == [{**CHAT, "kv_transfer_params": TICKET}]


def test_the_answer_of_the_decode_server_is_the_clients_byte_for_byte(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    text = b'{"choices":  [{"text": "h\xc3\xa9"}], "kv_transfer_params": null}\n'
    decode = engine(says(200, text, ("x-of-the-engine", "7")))

    got = proxy([prefill], [decode]).post("/v1/completions", json=ASKED)

    assert (got.status_code, got.content) == (200, text)
    assert got.headers["x-of-the-engine"] == "7"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-kvbus-prefill"] == prefill.url
    assert got.headers["x-kvbus-decode"] == decode.url


def test_both_servers_and_the_client_see_the_clients_request_id(
    proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    client = proxy([prefill], [decode])

    got = client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": "mine-7"})

    assert prefill.asked[0].headers["x-request-id"] == "mine-7"
    assert decode.asked[0].headers["x-request-id"] == "mine-7"
    assert got.headers.get_list("x-request-id") == ["mine-7"]
    assert logs.first("request.ended")["request_id"] == "mine-7"


@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "x" * 201}, {"X-Request-Id": ""}])
def test_a_request_without_a_usable_id_gets_one_that_both_servers_see(
    proxy: StartProxy, prefill: Engine, decode: Engine, given: dict[str, str]
) -> None:
    got = proxy([prefill], [decode]).post("/v1/completions", json=ASKED, headers=given)

    made = got.headers["x-request-id"]
    assert len(made) == 32
    assert [s.asked[0].headers["x-request-id"] for s in (prefill, decode)] == [made, made]


def test_authorization_and_the_query_are_passed_on_to_both_servers(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    client = proxy([prefill], [decode])

    client.post("/v1/completions?a=1", json=ASKED, headers={"Authorization": "Bearer k"})

    for server in (prefill, decode):
        assert server.asked[0].headers["authorization"] == "Bearer k"
        assert server.asked[0].query == "a=1"


def test_a_ticket_that_the_client_made_up_reaches_no_server(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    prefill.behaviour = offers(None)
    asked = {**ASKED, "kv_transfer_params": {"do_remote_prefill": True, "offer_id": "another's"}}

    proxy([prefill], [decode]).post("/v1/completions", json=asked)

    assert prefill.bodies[0]["kv_transfer_params"] == {"do_remote_decode": True}
    assert decode.bodies == [ASKED]


@pytest.mark.parametrize("params", [None, {}, [], "a", 7, False])
def test_an_answer_without_a_ticket_lets_the_decode_server_compute_the_prompt(
    proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs, params: Any
) -> None:
    prefill.behaviour = offers(params)

    got = proxy([prefill], [decode]).post("/v1/completions", json=ASKED)

    assert got.status_code == 200
    assert decode.bodies == [ASKED]
    assert logs.first("request.ended")["handover"] == "not_offered"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"n": 2}, "several_sequences"),
        ({"best_of": 3}, "several_sequences"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3, 4]]}, "several_prompts"),
        ({"prompt_embeds": "AAAA"}, "several_prompts"),
        ({"echo": True}, "prompt_asked_back"),
        ({"prompt_logprobs": 0}, "prompt_asked_back"),
    ],
)
def test_what_one_ticket_cannot_carry_is_served_by_the_decode_server_alone(
    *,
    proxy: StartProxy,
    prefill: Engine,
    decode: Engine,
    logs: Logs,
    keys: dict[str, Any],
    reason: str,
) -> None:
    got = proxy([prefill], [decode]).post("/v1/completions", json={**ASKED, **keys})

    assert got.status_code == 200
    assert prefill.asked == []
    assert decode.bodies == [{**ASKED, **keys}]
    assert logs.first("request.ended")["handover"] == reason


@pytest.mark.parametrize(
    "keys",
    [
        {"n": 1},
        {"n": None, "best_of": None},
        {"prompt": "a text"},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": []},
        {"echo": False, "prompt_logprobs": None},
    ],
)
def test_one_sequence_of_one_prompt_is_handed_over_however_it_is_written(
    proxy: StartProxy, prefill: Engine, decode: Engine, keys: dict[str, Any]
) -> None:
    proxy([prefill], [decode]).post("/v1/completions", json={**ASKED, **keys})

    assert decode.bodies == [{**ASKED, **keys, "kv_transfer_params": TICKET}]


def test_requests_go_to_the_servers_in_turn(proxy: StartProxy, engine: StartEngine) -> None:
    prefills = [engine(offers()) for _ in range(3)]
    decodes = [engine(says(200, {})) for _ in range(2)]
    client = proxy(prefills, decodes)

    for _ in range(6):
        client.post("/v1/completions", json=ASKED)

    assert [len(server.asked) for server in prefills] == [2, 2, 2]
    assert [len(server.asked) for server in decodes] == [3, 3]


def test_one_log_line_says_who_served_a_request_and_how_long_it_took(
    proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    proxy([prefill], [decode]).post("/v1/completions", json=ASKED)

    line = logs.first("request.ended")
    assert line["prefill"] == prefill.url
    assert line["decode"] == decode.url
    assert (line["outcome"], line["status"], line["handover"]) == ("completed", 200, "handed_over")
    assert 0 < line["prefill_s"] < line["first_token_s"] <= line["total_s"]


@pytest.mark.parametrize(("sent", "passed_on"), [(TRACE, {"traceparent": TRACE}), ("wrong", {})])
def test_the_trace_of_a_client_goes_to_prefill_with_the_params(
    proxy: StartProxy, prefill: Engine, decode: Engine, sent: str, passed_on: dict[str, str]
) -> None:
    headers = {"traceparent": sent}

    proxy([prefill], [decode]).post("/v1/completions", json=ASKED, headers=headers)

    asked = {"do_remote_decode": True, **passed_on}
    assert prefill.bodies[0]["kv_transfer_params"] == asked
    assert decode.bodies == [{**ASKED, "kv_transfer_params": TICKET}]
