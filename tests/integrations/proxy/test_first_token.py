"""A stream that begins with the token of prefill: what comes when, and which streams do not."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from tests.integrations.proxy.site import (
    ASKED,
    TICKET,
    Gate,
    Site,
    breaks_off,
    offers,
    says,
    streams,
)

OPTIONS = ("--first-token", "prefill")
PROMPT, TOKEN = [1, 2, 3], 7
CHOICE = {
    "text": " seven",
    "token_ids": [TOKEN],
    "prompt_token_ids": PROMPT,
    "finish_reason": "length",
}
PARAMS = {**TICKET, "remote_num_tokens": len(PROMPT)}
SAID = {
    "id": "cmpl-1",
    "created": 5,
    "model": "m",
    "choices": [CHOICE],
    "kv_transfer_params": PARAMS,
}
REST = b'data: {"choices": [{"text": " eight"}]}\n\ndata: [DONE]\n\n'


@pytest.fixture
def site(site_of: Callable[..., Site]) -> Site:
    made = site_of(*OPTIONS)
    made.prefill.does(says(200, SAID))
    return made


def test_the_client_has_the_token_of_prefill_before_decode_says_a_thing(site: Site) -> None:
    gate = Gate()
    site.decode.does(streams(gate, REST))

    with site.client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as got:
        parts = got.iter_raw()
        first = json.loads(next(parts).removeprefix(b"data: "))
        gate.open()
        rest = b"".join(parts)

    assert got.headers["content-type"].startswith("text/event-stream")
    assert first["choices"] == [
        {"index": 0, "text": " seven", "logprobs": None, "finish_reason": None}
    ]
    assert (first["id"], first["model"], rest) == ("cmpl-1", "m", REST)
    (asked,) = site.decode.bodies
    assert asked["prompt"] == [*PROMPT, TOKEN]
    assert asked["max_tokens"] == ASKED["max_tokens"] - 1  # type: ignore[operator]
    assert asked["kv_transfer_params"] == PARAMS
    assert site.prefill.bodies[0]["return_token_ids"] is True


KEYS: Mapping[str, Mapping[str, Any]] = {
    "no stream": {"stream": False},
    "one token": {"max_tokens": 1},
    "a stop string": {"stop": ["eight"]},
    "a penalty": {"presence_penalty": 0.5},
    "log probabilities": {"logprobs": 1},
    "usage": {"stream_options": {"include_usage": True}},
    "a length that is none": {"max_tokens": "many"},
}


@pytest.mark.parametrize("name", KEYS)
def test_a_request_that_looks_at_all_of_its_tokens_has_them_from_decode(
    site: Site, name: str
) -> None:
    keys = {"stream": True, **KEYS[name]}
    site.decode.does(streams(REST))

    got = site.ask(**keys)

    assert got.content == REST
    assert site.decode.bodies == [{**ASKED, **keys, "kv_transfer_params": PARAMS}]


CHOICES: Mapping[str, Mapping[str, Any]] = {
    "of a prompt without its last token": {"prompt_token_ids": [1, 2, 3, 4]},
    "that ends the answer": {"finish_reason": "stop"},
    "that is a part of a character": {"text": "\ufffd"},
    "that is no word": {"text": ""},
    "without its id": {"token_ids": None},
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_token_of_prefill_that_is_not_the_first_of_an_answer_is_left_out(
    site: Site, name: str
) -> None:
    site.prefill.does(says(200, {**SAID, "choices": [{**CHOICE, **CHOICES[name]}]}))
    site.decode.does(streams(REST))

    got = site.ask(stream=True)

    assert got.content == REST
    assert site.decode.bodies == [{**ASKED, "stream": True, "kv_transfer_params": PARAMS}]


def test_an_answer_that_has_begun_breaks_off_when_no_decode_server_goes_on(site: Site) -> None:
    for behaviour in (says(500, {}), breaks_off):
        site.rest()
        site.prefill.does(says(200, SAID))
        site.decode.does(behaviour)

        with pytest.raises(httpx.RemoteProtocolError):
            site.ask(stream=True)

        assert site.logged("request.ended")[0]["trouble"]


def test_without_a_ticket_decode_makes_all_tokens(site: Site) -> None:
    site.prefill.does(offers(None))
    site.decode.does(streams(REST))

    assert site.ask(stream=True).content == REST
    assert site.decode.bodies == [{**ASKED, "stream": True}]
