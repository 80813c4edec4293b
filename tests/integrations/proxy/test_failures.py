"""Servers that fail, and requests that are wrong: the client always learns whose fault it was."""

import socket
import threading

import pytest

from kvbus.integrations.proxy.options import IfPrefillFails
from tests.agents import wait_until
from tests.integrations.proxy.conftest import Logs, StartEngine, StartProxy
from tests.integrations.proxy.engines import (
    TICKET,
    WITHIN_S,
    Asked,
    Engine,
    Gate,
    after,
    breaks_off,
    offers,
    says,
)

ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40}
MISTAKE = {"error": {"message": "no such model", "type": "NotFoundError"}}


async def half_an_answer(asked: Asked) -> None:
    await asked.start(200, ("content-length", "100"))
    await asked.more(b"{")
    await breaks_off(asked)


FAILURES = {
    "500": says(500, {"error": "engine dead"}),
    "503": says(503, {}),
    "redirect": says(307, {}, ("location", "http://elsewhere/")),
    "breaks off": breaks_off,
    "half an answer": half_an_answer,
    "no JSON": says(200, b"<html>"),
    "no object": says(200, [1]),
    "deep": says(200, b"[" * 100_000),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_next_prefill_server_is_asked_when_one_fails(
    *,
    proxy: StartProxy,
    engine: StartEngine,
    prefill: Engine,
    decode: Engine,
    logs: Logs,
    failure: str,
) -> None:
    failing = engine(FAILURES[failure])
    client = proxy([failing, prefill], [decode])

    got = client.post("/v1/completions", json=ASKED)

    assert got.status_code == 200
    assert len(failing.asked) == len(prefill.asked) == 1
    assert decode.bodies == [{**ASKED, "kv_transfer_params": TICKET}]
    line = logs.first("request.ended")
    assert line["prefill"] == prefill.url
    assert [failing.url in trouble for trouble in line["prefill_failures"]] == [True]


def test_a_prefill_server_that_refuses_connections_is_passed_over_from_then_on(
    proxy: StartProxy, engine: StartEngine, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    closed = engine(offers())
    client = proxy([closed, prefill], [decode])
    closed.stop()

    answers = [client.post("/v1/completions", json=ASKED).status_code for _ in range(3)]

    assert answers == [200, 200, 200]
    assert all(body["kv_transfer_params"] == TICKET for body in decode.bodies)
    ended = logs.several(3, "request.ended")
    assert [len(line["prefill_failures"]) for line in ended] == [1, 0, 0]
    assert [line["server"] for line in logs.of("server.lost")] == [closed.url]


@pytest.mark.parametrize("failure", FAILURES)
def test_when_all_prefill_servers_fail_the_decode_server_computes_the_prompt(
    proxy: StartProxy, engine: StartEngine, decode: Engine, logs: Logs, failure: str
) -> None:
    failing = [engine(FAILURES[failure]) for _ in range(2)]

    got = proxy(failing, [decode]).post("/v1/completions", json=ASKED)

    assert got.status_code == 200
    assert [len(server.asked) for server in failing] == [1, 1]
    assert decode.bodies == [ASKED]
    assert logs.first("request.ended")["handover"] == "prefill_failed"


def test_with_refuse_the_failure_of_the_prefill_server_is_the_answer(
    proxy: StartProxy, engine: StartEngine, decode: Engine
) -> None:
    failing = engine(says(500, {"error": "engine dead"}))
    client = proxy([failing], [decode], if_prefill_fails=IfPrefillFails.REFUSE)

    got = client.post("/v1/completions", json=ASKED)

    assert (got.status_code, got.json()) == (500, {"error": "engine dead"})
    assert got.headers["x-kvbus-error-from"] == f"prefill server {failing.url}"
    assert decode.asked == []


@pytest.mark.parametrize("failure", ["breaks off", "no JSON"])
def test_with_refuse_a_prefill_server_without_an_answer_is_named(
    proxy: StartProxy, engine: StartEngine, decode: Engine, failure: str
) -> None:
    failing = engine(FAILURES[failure])
    client = proxy([failing], [decode], if_prefill_fails=IfPrefillFails.REFUSE)

    got = client.post("/v1/completions", json=ASKED)

    assert got.status_code == 502
    assert failing.url in got.json()["error"]["message"]
    assert got.headers["x-kvbus-error-from"] == f"prefill server {failing.url}"


def test_without_a_healthy_prefill_server_the_decode_server_computes_the_prompt(
    proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    prefill.health = 503

    got = proxy([prefill], [decode]).post("/v1/completions", json=ASKED)

    assert (got.status_code, prefill.asked, decode.bodies) == (200, [], [ASKED])
    assert logs.first("request.ended")["handover"] == "no_prefill_server"


def test_with_refuse_and_no_healthy_prefill_server_the_answer_is_503(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    prefill.health = 503
    client = proxy([prefill], [decode], if_prefill_fails=IfPrefillFails.REFUSE)

    got = client.post("/v1/completions", json=ASKED)

    assert got.status_code == 503
    assert got.json()["error"]["type"] == "no_prefill_server"


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_a_4xx_of_the_prefill_server_is_the_answer_and_nobody_else_is_asked(
    *,
    proxy: StartProxy,
    engine: StartEngine,
    prefill: Engine,
    decode: Engine,
    logs: Logs,
    status: int,
) -> None:
    refusing = engine(says(status, MISTAKE, ("retry-after", "3")))
    client = proxy([refusing, prefill], [decode])

    got = client.post("/v1/completions", json=ASKED)

    assert (got.status_code, got.json()) == (status, MISTAKE)
    assert got.headers["retry-after"] == "3"
    assert got.headers["x-kvbus-error-from"] == f"prefill server {refusing.url}"
    assert prefill.asked == decode.asked == []
    assert logs.first("request.ended")["outcome"] == "refused"


@pytest.mark.parametrize(("status", "outcome"), [(400, "refused"), (500, "failed")])
def test_an_error_of_the_decode_server_is_the_answer(
    *,
    proxy: StartProxy,
    prefill: Engine,
    engine: StartEngine,
    decode: Engine,
    logs: Logs,
    status: int,
    outcome: str,
) -> None:
    refusing = engine(says(status, MISTAKE))
    client = proxy([prefill], [refusing, decode])

    got = client.post("/v1/completions", json=ASKED)

    assert (got.status_code, got.json()) == (status, MISTAKE)
    assert got.headers["x-kvbus-error-from"] == f"decode server {refusing.url}"
    assert got.headers["x-kvbus-prefill"] == prefill.url
    assert decode.asked == []
    assert logs.first("request.ended")["outcome"] == outcome


def test_a_ticket_goes_to_the_next_decode_server_when_one_refuses_connections(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, decode: Engine
) -> None:
    closed = engine(says(200, {}))
    client = proxy([prefill], [closed, decode])
    closed.stop()

    got = client.post("/v1/completions", json=ASKED)

    assert got.status_code == 200
    assert got.headers["x-kvbus-decode"] == decode.url
    assert len(prefill.asked) == 1
    assert decode.bodies == [{**ASKED, "kv_transfer_params": TICKET}]


def test_a_decode_server_that_had_the_ticket_and_broke_off_is_the_end_of_the_request(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, decode: Engine, logs: Logs
) -> None:
    breaking = engine(breaks_off)
    client = proxy([prefill], [breaking, decode])

    got = client.post("/v1/completions", json=ASKED)

    assert got.status_code == 502
    assert breaking.url in got.json()["error"]["message"]
    assert got.headers["x-kvbus-error-from"] == f"decode server {breaking.url}"
    assert decode.asked == []
    assert logs.first("request.ended")["outcome"] == "failed"


def test_without_a_decode_server_the_answer_is_503_and_the_ticket_is_logged_as_left(
    proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    decode.health = 500

    got = proxy([prefill], [decode]).post("/v1/completions", json=ASKED)

    assert got.status_code == 503
    assert got.json()["error"]["type"] == "no_decode_server"
    assert logs.first("request.ended")["outcome"] == "unavailable"
    assert logs.first("offer.left")["trouble"] == "no decode server is healthy"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b"1" * 10_000, 400),
        (b"[1]", 400),
        (b"7", 400),
        (b" " * 2001 + b"{}", 413),
    ],
)
def test_a_body_that_is_no_request_is_refused_by_the_proxy(
    *, proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs, text: bytes, status: int
) -> None:
    limit = 2000 if status == 413 else 10**6
    client = proxy([prefill], [decode], max_body_bytes=limit)

    got = client.post("/v1/completions", content=text)

    assert got.status_code == status
    assert got.json()["error"]["code"] == status
    assert prefill.asked == decode.asked == []
    assert logs.first("request.ended")["outcome"] == "refused"


def test_one_request_more_than_the_proxy_takes_is_told_that_it_is_busy(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    gate = Gate()
    decode = engine(after(gate, says(200, {})))
    client = proxy([prefill], [decode], max_in_flight=1)
    first = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": ASKED})
    first.start()
    decode.first()

    got = client.post("/v1/completions", json=ASKED)

    assert (got.status_code, got.json()["error"]["type"]) == (503, "busy")
    gate.open()
    first.join(WITHIN_S)
    wait_until(lambda: "kvbus_proxy_in_flight 0.0" in client.get("/metrics").text, "room again")
    assert client.post("/v1/completions", json=ASKED).status_code == 200
    assert [line["outcome"] for line in logs.several(3, "request.ended")] == [
        "busy",
        "completed",
        "completed",
    ]


def test_bytes_that_are_not_http_end_their_own_connection_only(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    client = proxy([prefill], [decode])

    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
        answered = connection.recv(4096)

    assert b"400" in answered.split(b"\r\n")[0]
    assert client.post("/v1/completions", json=ASKED).status_code == 200
