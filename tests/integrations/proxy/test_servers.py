"""Which servers are asked: in turn those that are well, with what their last answers had."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvbus.protocol import Rendezvous, Ticket
from tests.agents import wait_until
from tests.integrations.proxy.site import (
    ANSWER,
    ASKED,
    TICKET,
    WITHIN_S,
    Gate,
    Kind,
    Site,
    after,
    breaks_off,
    offers,
    says,
)


def kinds(site: Site, name: str) -> Kind:
    return site.prefill if name == "prefill" else site.decode


def test_requests_and_questions_for_models_go_to_servers_in_turn(site: Site) -> None:
    for _ in range(4):
        assert site.ask().status_code == 200

    for kind in (site.prefill, site.decode):
        servers = [asked.server for asked in kind.asked]
        assert servers[:2] == servers[2:]
        assert sorted(servers[:2]) == sorted(engine.url for engine in kind.engines)
    models = {site.client.get("/v1/models").json() for _ in range(2)}
    assert models == {engine.url for engine in site.decode.engines}


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_server_that_is_closed_is_passed_over_until_it_listens_again(
    site: Site, name: str
) -> None:
    closed = kinds(site, name).engines[0]
    closed.stop()

    answers = [site.ask() for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert [body.get("kv_transfer_params") for body in site.decode.bodies] == [TICKET] * 3
    wait_until(lambda: "onnect" in site.health()[closed.url], "it is missed", WITHIN_S)
    assert site.health()["ready"]
    closed.start()
    wait_until(lambda: site.health()[closed.url] == "healthy", "it is found", WITHIN_S)

    def is_asked_again() -> bool:
        site.ask()
        return kinds(site, name).asked[-1].server == closed.url

    wait_until(is_asked_again, "it has rested", WITHIN_S)


def stop_all(site: Site, name: str) -> None:
    for engine in kinds(site, name).engines:
        engine.stop()


def test_without_a_prefill_server_decode_computes_the_prompt(site: Site) -> None:
    stop_all(site, "prefill")

    answers = [site.ask().json() for _ in range(2)]

    assert answers == [ANSWER] * 2
    assert (site.prefill.asked, site.decode.bodies) == ([], [ASKED] * 2)
    told = [line["handover"] for line in site.logged("request.ended", 2)]
    assert told == ["prefill_failed", "no_prefill_server"]
    assert site.client.get("/health").status_code == 503


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_without_a_server_that_is_needed_the_client_is_told_so(
    site_of: Callable[..., Site], name: str
) -> None:
    site = site_of("--if-prefill-fails", "refuse")
    stop_all(site, name)

    first, second = site.ask(), site.ask()

    assert (first.status_code, first.json()["error"]["type"]) == (502, f"{name}_lost")
    assert (second.status_code, second.json()["error"]["type"]) == (503, f"no_{name}_server")
    if name == "decode":
        assert site.client.get("/v1/models").status_code == 503


def test_a_server_that_sends_nothing_for_too_long_has_failed(
    site_of: Callable[..., Site],
) -> None:
    site = site_of("--timeout", "0.5", "--if-prefill-fails", "refuse")
    site.prefill.does(after(Gate(), offers()))

    got = site.ask()

    assert got.status_code == 502
    assert "has sent nothing for 0.5 s" in got.json()["error"]["message"]
    assert len(site.prefill.asked) == 2
    assert site.decode.asked == []


# With --overlap, both servers at once

OF_AGENT = Ticket("p", "boot", "tcp://10.0.0.1:7501", "e", "i", "o", "r", 3, 32 * "0").to_json()
LEARNT = {"do_remote_prefill": True, "ticket": OF_AGENT}
SIGNED = {**LEARNT, "ticket": {**OF_AGENT, "signature": 64 * "a"}}


@pytest.fixture
def knowing(site_of: Callable[..., Site]) -> Site:
    """A proxy that has seen a ticket of each prefill server."""
    site = site_of("--overlap")
    site.prefill.does(offers(LEARNT))
    for _ in range(2):
        site.ask()
    site.prefill.asked.clear()
    site.decode.asked.clear()
    return site


def test_both_get_a_request_at_once_with_one_name(knowing: Site) -> None:
    gate = Gate()
    knowing.prefill.does(after(Gate(), offers(LEARNT)))
    knowing.decode.does(after(gate, says(200, ANSWER)))

    with ThreadPoolExecutor() as threads:
        answer = threads.submit(knowing.ask)
        asked = [kind.wait_asked() for kind in (knowing.prefill, knowing.decode)]
        gate.open()
        assert answer.result().json() == ANSWER

    assert asked[0].gone.wait(WITHIN_S), "prefill is told to stop"
    to_prefill, to_decode = (one.body["kv_transfer_params"] for one in asked)
    met = Rendezvous.from_json(to_decode["rendezvous"])
    assert to_prefill == {"do_remote_decode": True, "transfer_id": met.transfer_id}
    assert (to_decode["do_remote_prefill"], met.endpoint) == (True, OF_AGENT["endpoint"])


def test_of_several_prefill_servers_each_is_asked_and_known(site_of: Callable[..., Site]) -> None:
    site = site_of("--overlap", "--timeout", "100")  # not the one that knows
    site.prefill.does(offers(LEARNT))

    for _ in range(4):
        site.ask()

    servers = [line["prefill"] for line in site.logged("request.ended", 4)]
    met = ["rendezvous" in body["kv_transfer_params"] for body in site.decode.bodies]
    assert sorted(servers[:2]) == sorted(engine.url for engine in site.prefill.engines)
    assert servers[:2] == servers[2:]
    assert met == [False, False, True, True]


def test_when_prefill_fails_decode_is_asked_again_without_it(knowing: Site) -> None:
    gate = Gate()
    knowing.prefill.does(after(gate, breaks_off))
    knowing.decode.does(after(Gate(), says(200, ANSWER)), says(200, ANSWER))

    with ThreadPoolExecutor() as threads:
        answer = threads.submit(knowing.ask)
        knowing.decode.wait_asked()
        gate.open()
        assert answer.result().json() == ANSWER

    first, again = knowing.decode.asked
    assert first.gone.wait(WITHIN_S)
    assert "rendezvous" in first.body["kv_transfer_params"]
    assert again.body == ASKED


def test_what_prefill_says_is_the_clients_mistake_is_the_answer_at_once(knowing: Site) -> None:
    mistake = {"error": {"message": "no such model"}}
    knowing.prefill.does(says(404, mistake))
    knowing.decode.does(after(Gate(), says(200, ANSWER)))

    got = knowing.ask()

    assert (got.status_code, got.json()) == (404, mistake)
    assert all(asked.gone.wait(WITHIN_S) for asked in knowing.decode.asked)
    assert knowing.logged("request.ended", 3)[-1]["handover"] == "refused"


@pytest.mark.parametrize("params", [SIGNED, {"do_remote_prefill": True, "remote_host": "h"}])
def test_without_a_ticket_to_learn_from_all_goes_as_before(
    site_of: Callable[..., Site], params: Any
) -> None:
    site = site_of("--overlap", "--timeout", "200")  # not the one that knows
    site.prefill.does(offers(params))

    for _ in range(4):
        site.ask()

    assert [body["kv_transfer_params"] for body in site.decode.bodies] == [params] * 4
