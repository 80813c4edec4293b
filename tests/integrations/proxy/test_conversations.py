"""What an answer came with goes with the next turn of its conversation, once."""

from typing import Any

import httpx
import pytest

from tests.integrations.proxy.conftest import StartEngine, StartProxy
from tests.integrations.proxy.engines import TICKET, Behaviour, Engine, breaks_off, says, streams

ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40}
FIRST = {"do_remote_decode": True}
TURN = {**TICKET, "do_remote_prefill": False, "do_remote_decode": True}
ANSWER = {"choices": [{"text": "abc"}], "kv_transfer_params": TURN}


def said(engine: Engine) -> list[Any]:
    """The params of each request that an engine got."""
    return [body["kv_transfer_params"] for body in engine.bodies]


def ask(client: httpx.Client, conversation_id: Any) -> httpx.Response:
    asked = {**ASKED, "conversation_id": conversation_id}
    return client.post("/v1/completions", json=asked)


def test_the_next_turn_brings_what_the_answer_came_with(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    decode = engine(says(200, ANSWER))
    client = proxy([prefill], [decode])

    answers = [ask(client, "one").json() for _ in range(3)]

    assert answers == [ANSWER] * 3
    assert said(prefill) == [FIRST, TURN, TURN]
    assert said(decode) == [TICKET] * 3


def test_no_server_is_told_what_the_client_calls_its_conversation(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    decode = engine(says(200, ANSWER))

    ask(proxy([prefill], [decode]), "one")

    assert all("conversation_id" not in body for body in prefill.bodies + decode.bodies)


def test_a_ticket_goes_to_the_conversation_that_it_is_of(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    decode = engine(says(200, ANSWER))
    client = proxy([prefill], [decode])

    ask(client, "one")
    ask(client, "other")
    client.post("/v1/completions", json=ASKED)

    assert said(prefill) == [FIRST] * 3


def test_a_ticket_is_used_once(proxy: StartProxy, prefill: Engine, engine: StartEngine) -> None:
    decode = engine(says(200, ANSWER))
    client = proxy([prefill], [decode])
    ask(client, "one")
    decode.behaviour = says(200, {"choices": []})

    ask(client, "one")
    ask(client, "one")

    assert said(prefill) == [FIRST, TURN, FIRST]


@pytest.mark.parametrize(
    "answer",
    [
        says(200, b"no JSON"),
        says(200, [1]),
        says(200, {"kv_transfer_params": None}),
        says(200, {"kv_transfer_params": [TURN]}),
        says(200, {"kv_transfer_params": TICKET}),
        streams(b'data: {"kv_transfer_params": {"do_remote_decode": true}}\n\n'),
        breaks_off,
    ],
)
def test_an_answer_without_a_ticket_for_the_next_turn_leaves_none(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, answer: Behaviour
) -> None:
    decode = engine(answer)
    client = proxy([prefill], [decode])

    ask(client, "one")
    ask(client, "one")

    assert said(prefill) == [FIRST, FIRST]


def test_the_next_prefill_server_is_not_sent_a_ticket_that_one_was(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    decode, broken = engine(says(200, ANSWER)), engine(says(500, {}))
    client = proxy([broken, prefill], [decode])

    for _ in range(5):
        ask(client, "one")

    assert TURN in said(broken)
    assert said(broken).count(TURN) + said(prefill).count(TURN) == 4


@pytest.mark.parametrize("name", ["", 7, ["one"], 257 * "a"])
def test_what_is_no_name_of_a_conversation_is_refused(
    proxy: StartProxy, prefill: Engine, decode: Engine, name: Any
) -> None:
    got = ask(proxy([prefill], [decode]), name)

    assert got.status_code == 400
    assert "conversation_id" in got.json()["error"]["message"]
    assert prefill.bodies == []
