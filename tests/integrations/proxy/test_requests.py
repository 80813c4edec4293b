"""What each server is asked for, and what the client is told, whatever servers do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.integrations.proxy.site import (
    ANSWER,
    ASKED,
    TICKET,
    Behaviour,
    Site,
    breaks_off,
    offers,
    says,
    streams,
)

Keys = Mapping[str, Any]
REFUSE = ("--if-prefill-fails", "refuse")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ONE_TOKEN = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
OF_MANY_TOKENS = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 9}

HANDED_OVER: Mapping[str, tuple[Keys, Keys]] = {
    "as it is": ({}, {}),
    "many tokens": (OF_MANY_TOKENS, {}),
    "a chat's tokens": ({"max_completion_tokens": 30}, {"max_completion_tokens": 1}),
    "one sequence": ({"n": 1, "best_of": None}, {"n": 1, "best_of": None}),
    "one prompt of a list": ({"prompt": [[1, 2]]}, {"prompt": [[1, 2]]}),
    "a ticket that is the client's": ({"kv_transfer_params": {"offer_id": "another's"}}, {}),
}
"""Keys of the client's request, and those that prefill gets besides `ONE_TOKEN`."""


@pytest.mark.parametrize("name", HANDED_OVER)
def test_prefill_is_asked_for_one_token_and_decode_gets_the_request_and_the_ticket(
    site: Site, name: str
) -> None:
    keys, to_prefill = HANDED_OVER[name]

    got = site.ask("/v1/chat/completions", **keys)

    assert (got.status_code, got.json()) == (200, ANSWER)
    assert site.prefill.bodies == [{**ASKED, **to_prefill, **ONE_TOKEN}]
    assert site.decode.bodies == [{**ASKED, **keys, "kv_transfer_params": TICKET}]
    assert site.prefill.asked[0].path == site.decode.asked[0].path == "/v1/chat/completions"
    (line,) = site.logged("request.ended")
    assert (line["outcome"], line["handover"]) == ("answered", "handed_over")
    assert 0 < line["prefill_s"] < line["first_token_s"] <= line["total_s"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"n": 2}, "several_sequences"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt_embeds": "AAAA"}, "several_prompts"),
        ({"prompt_logprobs": 0}, "prompt_asked_back"),
    ],
)
def test_what_one_ticket_cannot_carry_is_served_by_decode_alone(
    site: Site, keys: Keys, reason: str
) -> None:
    got = site.ask(**keys, kv_transfer_params={"offer_id": "another's"})

    assert got.status_code == 200
    assert (site.prefill.bodies, site.decode.bodies) == ([], [{**ASKED, **keys}])
    assert site.logged("request.ended")[0]["handover"] == reason


@dataclass(frozen=True)
class Outcome:
    """What servers do, one request after the other, and what comes of it.

    ``blames`` is the kind whose error the client gets, ``asked`` how many requests each kind got.
    """

    prefill: tuple[Behaviour, ...] = (offers(),)
    decode: tuple[Behaviour, ...] = (says(200, ANSWER),)
    options: tuple[str, ...] = ()
    status: int = 200
    blames: str = ""
    asked: tuple[int, int] = (1, 1)
    handover: str = "handed_over"
    headers: Mapping[str, str] = field(default_factory=dict)


MISTAKE = {"error": {"message": "no such model", "type": "NotFoundError"}}
CLIENTS_MISTAKE = says(429, MISTAKE, retry_after="3")
ANSWERS_500 = says(500, MISTAKE)
FAILURES: Mapping[str, Behaviour] = {
    "answers 500": ANSWERS_500,
    "redirects": says(307, {}, location="http://elsewhere/"),
    "breaks off": breaks_off,
    "breaks off in its answer": streams(b'{"choices":', breaks_off, kind="application/json"),
    "says no object": says(200, [1]),
    "says what is too deep": says(200, b"[" * 100_000),
}
NO_TICKETS: Sequence[object] = (None, {}, "a")
REFUSED = Outcome(options=REFUSE, blames="prefill", asked=(2, 0))
OUTCOMES = {
    **{
        f"a prefill server {name}": Outcome((failure, offers()), asked=(2, 1))
        for name, failure in FAILURES.items()
    },
    **{
        f"prefill has no ticket but {params}": Outcome((offers(params),), handover="not_offered")
        for params in NO_TICKETS
    },
    "each prefill server breaks off": Outcome(
        (breaks_off,), asked=(2, 1), handover="prefill_failed"
    ),
    "each prefill server answers 500, and that is refused": replace(
        REFUSED, prefill=(ANSWERS_500,), status=500, handover="prefill_failed"
    ),
    "each prefill server breaks off, and that is refused": replace(
        REFUSED, prefill=(breaks_off,), status=502, handover="prefill_failed"
    ),
    "prefill says that it is the client's mistake": Outcome(
        (CLIENTS_MISTAKE,),
        status=429,
        blames="prefill",
        asked=(1, 0),
        handover="refused",
        headers={"retry-after": "3"},
    ),
    "decode says that it is the client's mistake": Outcome(
        decode=(CLIENTS_MISTAKE,), status=429, blames="decode"
    ),
    "decode answers 500": Outcome(decode=(ANSWERS_500,), status=500, blames="decode"),
    "decode breaks off with the ticket": Outcome(decode=(breaks_off,), status=502, blames="decode"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_client_is_answered_by_who_can_and_learns_whose_fault_it_was(
    site_of: Callable[..., Site], name: str
) -> None:
    case = OUTCOMES[name]
    site = site_of(*case.options)
    site.prefill.does(*case.prefill)
    site.decode.does(*case.decode)

    got = site.ask()

    assert got.status_code == case.status
    assert (len(site.prefill.asked), len(site.decode.asked)) == case.asked
    assert case.headers.items() <= got.headers.items()
    has_ticket = {"kv_transfer_params": TICKET} if case.handover == "handed_over" else {}
    assert site.decode.bodies == [{**ASKED, **has_ticket}] * case.asked[1]
    (line,) = site.logged("request.ended")
    assert (line["status"], line["handover"]) == (case.status, case.handover)
    if case.blames:
        server = line[case.blames]
        assert got.json() == MISTAKE or server in got.json()["error"]["message"]
    else:
        assert got.json() == ANSWER
        assert got.headers["x-kvbus-decode"] == site.decode.asked[0].server


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b"1" * 10_000, 400),
        (b"[1]", 400),
        (b" " * (64 << 20) + b"{}", 413),
    ],
    ids=range(6),
)
def test_a_body_that_is_no_request_is_refused_by_the_proxy(
    site: Site, text: bytes, status: int
) -> None:
    got = site.client.post("/v1/completions", content=text)

    assert (got.status_code, got.json()["error"]["code"]) == (status, status)
    assert site.prefill.asked == site.decode.asked == []
    assert site.logged("request.ended")[0]["status"] == status


def test_the_key_and_the_id_of_a_request_go_to_both_servers_and_bodies_are_not_changed(
    site: Site,
) -> None:
    text = b'{"choices":  [{"text": "h\xc3\xa9"}], "kv_transfer_params": null}\n'
    site.decode.does(says(200, text))
    sent = {"Authorization": "Bearer k", "X-Request-Id": "mine-7", "Accept-Encoding": "gzip"}

    got = site.ask(headers={**sent, "traceparent": TRACE})

    assert got.content == text
    assert got.headers.get_list("x-request-id") == ["mine-7"]
    for asked in (site.prefill.asked[0], site.decode.asked[0]):
        seen = [asked.headers[name] for name in ("authorization", "x-request-id")]
        assert seen == ["Bearer k", "mine-7"]
        assert asked.headers["accept-encoding"] == "identity"
    assert site.prefill.bodies[0]["kv_transfer_params"]["traceparent"] == TRACE
    assert site.logged("request.ended")[0]["request_id"] == "mine-7"


def test_an_id_or_a_trace_that_is_none_is_not_passed_on_nor_are_other_paths(site: Site) -> None:
    got = site.ask(headers={"X-Request-Id": "x" * 201, "traceparent": "wrong"})

    made = got.headers["x-request-id"]
    assert len(made) == 32
    assert site.decode.asked[0].headers["x-request-id"] == made
    assert site.prefill.bodies == [{**ASKED, **ONE_TOKEN}]
    assert site.ask("/v1/embeddings").status_code == 404
