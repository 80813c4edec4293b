"""An answer that comes in pieces goes through in pieces, unchanged."""

import httpx
import pytest

from tests.integrations.proxy.conftest import Logs, StartEngine, StartProxy
from tests.integrations.proxy.engines import Asked, Engine, Gate, breaks_off, says, streams

ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40, "stream": True}
FIRST, SECOND, LAST = b'data: {"a": 1}\n\n', b'data: {"a": "h\xc3\xa9"}\n\n', b"data: [DONE]\n\n"


def test_the_client_has_an_event_before_the_next_one_is_made(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    gates = Gate(), Gate()
    decode = engine(streams(FIRST, gates[0], SECOND, gates[1], LAST))
    client = proxy([prefill], [decode])

    with client.stream("POST", "/v1/completions", json=ASKED) as answer:
        parts = answer.iter_raw()
        first = next(parts)
        gates[0].open()
        second = next(parts)
        gates[1].open()
        rest = b"".join(parts)

    assert (first, second, rest) == (FIRST, SECOND, LAST)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_half_an_event_is_not_held_back(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    gate = Gate()
    client = proxy([prefill], [engine(streams(b'data: {"a"', gate, b": 1}\n\n"))])

    with client.stream("POST", "/v1/completions", json=ASKED) as answer:
        parts = answer.iter_raw()
        first = next(parts)
        gate.open()
        rest = b"".join(parts)

    assert (first, rest) == (b'data: {"a"', b": 1}\n\n")


def test_the_headers_come_before_the_first_event(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    gate = Gate()
    client = proxy([prefill], [engine(streams(gate, FIRST))])

    with client.stream("POST", "/v1/completions", json=ASKED) as answer:
        status = answer.status_code
        gate.open()
        body = answer.read()

    assert (status, body) == (200, FIRST)


def test_a_stream_that_its_server_breaks_off_ends_with_an_error_event_and_without_an_end(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, logs: Logs
) -> None:
    gate = Gate()

    async def half(asked: Asked) -> None:
        await asked.start(200, ("content-type", "text/event-stream"))
        await asked.more(FIRST)
        await gate.wait()
        await breaks_off(asked)

    decode = engine(half)
    client = proxy([prefill], [decode])
    got = []

    with client.stream("POST", "/v1/completions", json=ASKED) as answer:
        parts = answer.iter_raw()
        got.append(next(parts))
        gate.open()
        with pytest.raises(httpx.RemoteProtocolError):
            got.extend(parts)

    assert got[0] == FIRST
    assert b"data: {" in got[1]
    assert decode.url.encode() in got[1]
    line = logs.first("request.ended")
    assert (line["outcome"], line["status"]) == ("failed", 200)
    assert decode.url in line["trouble"]


def test_a_whole_answer_that_its_server_breaks_off_never_looks_whole(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    async def half(asked: Asked) -> None:
        await asked.start(200, ("content-type", "application/json"))
        await asked.more(b'{"choices":')
        await breaks_off(asked)

    client = proxy([prefill], [engine(half)])

    with pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/completions", json=ASKED)


def test_a_server_that_could_compress_is_asked_not_to(
    proxy: StartProxy, prefill: Engine, engine: StartEngine
) -> None:
    decode = engine(says(200, {}))
    client = proxy([prefill], [decode])

    client.post("/v1/completions", json=ASKED, headers={"Accept-Encoding": "gzip"})

    assert [s.asked[0].headers["accept-encoding"] for s in (prefill, decode)] == ["identity"] * 2
