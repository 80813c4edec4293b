"""A client gets an answer as its server makes it; when it leaves, servers are let go."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.agents import wait_until
from tests.integrations.proxy.site import (
    ASKED,
    WITHIN_S,
    Gate,
    Site,
    after,
    breaks_off,
    offers,
    says,
    streams,
)

EVENT = b'data: {"a": "h\xc3\xa9"}\n\n'


def test_the_client_has_each_part_before_the_next_one_is_made_be_it_an_event_or_half_of_one(
    site: Site,
) -> None:
    parts, gates = (EVENT, b'data: {"b"', b": 1}\n\n"), (Gate(), Gate(), Gate())
    made = [each for pair in zip(gates, parts, strict=True) for each in pair]
    site.decode.does(streams(*made))

    with site.client.stream("POST", "/v1/completions", json=ASKED) as answer:  # headers came first
        got, raw = [], answer.iter_raw()
        for gate in gates:
            gate.open()
            got.append(next(raw))

    assert tuple(got) == parts
    assert answer.headers["content-type"] == "text/event-stream"


def test_a_whole_answer_that_its_server_breaks_off_never_looks_whole(site: Site) -> None:
    site.decode.does(streams(b'{"choices":', breaks_off, kind="application/json"))

    with pytest.raises(httpx.RemoteProtocolError):
        site.ask()


def test_a_stream_that_its_server_breaks_off_has_no_end(
    site: Site,
) -> None:
    gate, got = Gate(), []
    site.decode.does(streams(EVENT, gate, breaks_off))

    with site.client.stream("POST", "/v1/completions", json=ASKED) as answer:
        raw = answer.iter_raw()
        got.append(next(raw))
        gate.open()
        with pytest.raises(httpx.RemoteProtocolError):
            got.extend(raw)

    (line,) = site.logged("request.ended")
    assert (line["outcome"], line["status"]) == ("answered", 200)
    assert line["trouble"].startswith(f"decode server {line['decode']} broke off")
    assert got == [EVENT]


@contextmanager
def asking(site: Site, *, announced: int | None = None) -> Iterator[socket.socket]:
    """A client that closes its connection when it likes."""
    text = json.dumps(ASKED).encode()
    base = site.client.base_url
    with socket.create_connection((base.host, base.port), WITHIN_S) as connection:
        length = announced or len(text)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + text)
        yield connection


@pytest.mark.parametrize("stage", ["its request", "prefill", "decode", "a stream"])
def test_a_client_that_leaves_aborts_what_its_servers_do_and_no_ticket_is_used_twice(
    site: Site, stage: str
) -> None:
    if stage == "prefill":
        site.prefill.does(after(Gate(), offers()))
    site.decode.does(
        streams(EVENT, Gate()) if stage == "a stream" else after(Gate(), says(200, {}))
    )

    with asking(site, announced=10_000 if stage == "its request" else None) as connection:
        match stage:
            case "its request":
                wait_until(lambda: site.health()["in_flight"] == 1, "it has come")
            case "prefill":
                site.prefill.wait_asked()
            case "decode":
                site.decode.wait_asked()
            case "a stream":
                got = b""
                while EVENT not in got:
                    got += connection.recv(4096)

    asked = {"its request": (0, 0), "prefill": (1, 0)}.get(stage, (1, 1))
    (line,) = site.logged("request.ended")
    assert line["outcome"] == "client_gone"
    assert (len(site.prefill.asked), len(site.decode.asked)) == asked
    for one in (site.decode.asked or site.prefill.asked)[:1]:
        assert one.gone.wait(WITHIN_S)
