"""A client that leaves: both servers are let go, at every stage, and no ticket is forgotten."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.agents import wait_until
from tests.integrations.proxy.conftest import Logs, StartEngine, StartProxy
from tests.integrations.proxy.engines import (
    TICKET,
    WITHIN_S,
    Engine,
    Gate,
    after,
    offers,
    port_that_accepts_nothing,
    says,
    streams,
)

ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40, "min_tokens": 7}
EVENT = b"data: {}\n\n"


@contextmanager
def asking(
    client: httpx.Client, body: dict[str, Any], *, announced: int | None = None
) -> Iterator[socket.socket]:
    """A client that may close its connection at any time."""
    text = json.dumps(body).encode()
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, WITHIN_S) as connection:
        length = announced or len(text)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + text)
        yield connection


def test_a_client_that_leaves_during_prefill_aborts_it_and_nothing_is_decoded(
    proxy: StartProxy, engine: StartEngine, decode: Engine, logs: Logs
) -> None:
    prefill = engine(after(Gate(), offers()))
    client = proxy([prefill], [decode])

    with asking(client, ASKED):
        asked = prefill.first()

    assert asked.gone.wait(WITHIN_S)
    line = logs.first("request.ended")
    assert (line["outcome"], line["status"], line["decode"]) == ("client_gone", None, None)
    assert decode.asked == []


def test_a_client_that_leaves_before_the_first_token_aborts_the_decode_server(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    decode = engine(after(Gate(), says(200, {})))
    client = proxy([prefill], [decode])

    with asking(client, ASKED):
        asked = decode.first()

    assert asked.gone.wait(WITHIN_S)
    assert logs.first("request.ended")["outcome"] == "client_gone"


def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_the_decode_server(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    decode = engine(streams(EVENT, Gate()))
    client = proxy([prefill], [decode])

    with asking(client, {**ASKED, "stream": True}) as connection:
        got = b""
        while EVENT not in got:
            got += connection.recv(4096)

    assert decode.first().gone.wait(WITHIN_S)
    line = logs.first("request.ended")
    assert (line["outcome"], line["status"]) == ("client_gone", 200)
    assert line["first_token_s"] is not None


def test_a_ticket_that_reached_a_decode_server_is_not_given_back_a_second_time(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    decode = engine(after(Gate(), says(200, {})))
    client = proxy([prefill], [decode])

    with asking(client, ASKED):
        decode.first()

    logs.first("request.ended")
    client.get("/v1/models")
    assert len(decode.asked) == 1
    assert logs.of("offer.left") == logs.of("offer.released") == []


def test_a_ticket_that_reached_no_decode_server_is_given_back_by_the_next_one(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, decode: Engine, logs: Logs
) -> None:
    blocked = engine(says(200, {}))
    client = proxy([prefill], [blocked, decode])
    blocked.stop()

    with port_that_accepts_nothing(blocked.port), asking(client, {**ASKED, "stream": True}):
        prefill.first()
        wait_until(lambda: connecting_to(blocked.port), "the proxy connects", WITHIN_S)

    asked = decode.first()
    assert asked.body == {
        **{key: value for key, value in ASKED.items() if key != "min_tokens"},
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": TICKET,
    }
    assert logs.first("offer.released")["decode"] == decode.url
    assert logs.first("request.ended")["outcome"] == "client_gone"
    assert not asked.gone.is_set()


def test_a_release_that_fails_is_logged_with_the_prefill_server_that_waits(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    blocked, failing = engine(says(200, {})), engine(says(500, {}))
    client = proxy([prefill], [blocked, failing])
    blocked.stop()

    with port_that_accepts_nothing(blocked.port), asking(client, ASKED):
        prefill.first()
        wait_until(lambda: connecting_to(blocked.port), "the proxy connects", WITHIN_S)

    left = logs.first("offer.left")
    assert left["prefill"] == prefill.url
    assert failing.url in left["trouble"]


def test_a_release_ends_in_time_though_no_server_answers(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    blocked, silent = engine(says(200, {})), engine(after(Gate(), says(200, {})))
    client = proxy([prefill], [blocked, silent], release_timeout_s=2.0)
    blocked.stop()

    with port_that_accepts_nothing(blocked.port), asking(client, ASKED):
        prefill.first()
        wait_until(lambda: connecting_to(blocked.port), "the proxy connects", WITHIN_S)

    assert logs.first("offer.left")["trouble"] == "not in time"
    assert silent.first().gone.wait(WITHIN_S)


def test_a_client_that_leaves_in_the_middle_of_its_request_troubles_no_server(
    proxy: StartProxy, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    client = proxy([prefill], [decode])

    with asking(client, ASKED, announced=100_000):
        wait_until(lambda: "kvbus_proxy_in_flight 1.0" in client.get("/metrics").text, "in flight")

    assert logs.first("request.ended")["outcome"] == "client_gone"
    assert prefill.asked == decode.asked == []


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_nothing_is_in_flight_after_clients_have_left(
    proxy: StartProxy, engine: StartEngine, stage: str
) -> None:
    prefill = engine(after(Gate(), offers()) if stage == "prefill" else offers())
    decode = engine(after(Gate(), says(200, {})))
    client = proxy([prefill], [decode])
    waiting = prefill if stage == "prefill" else decode

    for turn in range(3):
        with asking(client, ASKED):
            wait_until(partial(has_asked, waiting, turn), "asked", WITHIN_S)

    wait_until(lambda: "kvbus_proxy_in_flight 0.0" in client.get("/metrics").text, "all ended")
    for asked in waiting.asked:
        assert asked.gone.wait(WITHIN_S)
    assert 'kvbus_proxy_requests_total{outcome="client_gone"} 3.0' in client.get("/metrics").text


def has_asked(engine: Engine, turn: int) -> bool:
    return len(engine.asked) > turn


def connecting_to(port: int) -> bool:
    """Whether some socket of this machine waits for an answer of ``port``, but the test's own.

    In /proc/net/tcp, state 02 is a connection that was asked for and not answered.
    """
    with open("/proc/net/tcp", encoding="ascii") as table:  # noqa: PTH123 - not a file to keep
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "02" for row in rows) > 1
