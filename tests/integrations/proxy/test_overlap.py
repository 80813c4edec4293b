"""With --overlap both servers get a request at once, as soon as the prefill agent is known."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvbus.protocol import Rendezvous, Ticket
from tests.agents import wait_until
from tests.integrations.proxy.conftest import StartEngine, StartProxy
from tests.integrations.proxy.engines import Engine, Gate, after, breaks_off, offers, says

ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40}
TICKET = Ticket("p", "boot", "tcp://10.0.0.1:7501", "e", "i", "o", "r", 3, 32 * "0")
PARAMS: dict[str, Any] = {"do_remote_prefill": True, "ticket": TICKET.to_json()}
SIGNED = {**PARAMS, "ticket": {**PARAMS["ticket"], "signature": 64 * "a"}}
TEXT = {"choices": [{"text": "b"}]}


@pytest.fixture
def prefill(engine: StartEngine) -> Engine:
    return engine(offers(PARAMS))


@pytest.fixture
def decode(engine: StartEngine) -> Engine:
    return engine(says(200, TEXT))


def test_the_second_request_goes_to_both_with_one_name(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    client = proxy([prefill], [decode], overlap=True)
    for _ in range(2):
        assert client.post("/v1/completions", json=ASKED).json() == TEXT

    first, second = (body["kv_transfer_params"] for body in prefill.bodies)
    assert first == {"do_remote_decode": True}
    assert second.keys() == {"do_remote_decode", "transfer_id"}
    assert decode.bodies[0]["kv_transfer_params"] == PARAMS
    met = decode.bodies[1]["kv_transfer_params"]
    assert met["do_remote_prefill"]
    rendezvous = Rendezvous.from_json(met["rendezvous"])
    assert rendezvous.transfer_id == second["transfer_id"]
    assert rendezvous.endpoint == TICKET.endpoint


def test_decode_is_asked_while_prefill_computes(
    proxy: StartProxy, engine: StartEngine, decode: Engine
) -> None:
    gate = Gate()
    prefill = engine(offers(PARAMS))
    client = proxy([prefill], [decode], overlap=True)
    client.post("/v1/completions", json=ASKED)
    prefill.behaviour = after(gate, offers(PARAMS))

    try:
        assert client.post("/v1/completions", json=ASKED).json() == TEXT
        assert len(decode.bodies) == 2
        wait_until(prefill.asked[1].gone.is_set, "prefill is told to stop")
    finally:
        gate.open()


def test_when_prefill_fails_the_client_gets_what_it_gets_without_overlap(
    proxy: StartProxy, engine: StartEngine, prefill: Engine
) -> None:
    gate = Gate()
    decode = engine(says(200, TEXT))
    client = proxy([prefill], [decode], overlap=True)
    client.post("/v1/completions", json=ASKED)
    prefill.behaviour = breaks_off
    decode.behaviour = after(gate, says(200, TEXT))

    with ThreadPoolExecutor() as threads:
        answer = threads.submit(client.post, "/v1/completions", json=ASKED)
        try:
            wait_until(lambda: len(decode.asked) == 3, "decode is asked again")
            assert decode.asked[1].gone.wait(20)
        finally:
            gate.open()
        assert answer.result().json() == TEXT
    assert "kv_transfer_params" not in decode.bodies[2]


@pytest.mark.parametrize("params", [SIGNED, {"do_remote_prefill": True, "remote_host": "h"}])
def test_without_a_ticket_to_learn_from_all_goes_as_before(
    proxy: StartProxy, engine: StartEngine, decode: Engine, params: Any
) -> None:
    prefill = engine(offers(params))
    client = proxy([prefill], [decode], overlap=True)
    for _ in range(2):
        client.post("/v1/completions", json=ASKED)

    assert [body["kv_transfer_params"] for body in decode.bodies] == [params, params]
