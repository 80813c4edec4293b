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
    Behaviour,
    Gate,
    Kind,
    Site,
    after,
    breaks_off,
    offers,
    says,
    streams,
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
    assert [line["server"] for line in site.logged("server.lost")] == [closed.url]
    closed.start()
    wait_until(lambda: site.health()[closed.url] == "healthy", "it is found", WITHIN_S)
    for _ in range(2):
        site.ask()
    assert closed.url in [asked.server for asked in kinds(site, name).asked[3:]]


def all_ill(site: Site, name: str) -> None:
    kind = kinds(site, name)
    kind.health = 503
    told = "/health answered 503"
    wait_until(lambda: list(site.health().values()).count(told) == 2, "both are ill", WITHIN_S)


def test_without_a_prefill_server_decode_computes_the_prompt(site: Site) -> None:
    all_ill(site, "prefill")

    assert site.ask().json() == ANSWER

    assert (site.prefill.asked, site.decode.bodies) == ([], [ASKED])
    assert site.logged("request.ended")[0]["handover"] == "no_prefill_server"
    assert site.client.get("/health").status_code == 503


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_without_a_server_that_is_needed_the_answer_is_503(
    site_of: Callable[..., Site], name: str
) -> None:
    site = site_of("--if-prefill-fails", "refuse")
    all_ill(site, name)

    got = site.ask()

    assert (got.status_code, got.json()["error"]["type"]) == (503, f"no_{name}_server")
    if name == "decode":
        assert site.client.get("/v1/models").status_code == 503
        assert site.logged("offer.left")[0]["trouble"] == "no decode server is healthy"


def test_one_request_more_than_the_proxy_takes_is_told_that_it_is_busy(
    site_of: Callable[..., Site],
) -> None:
    site, gate = site_of("--max-in-flight", "1"), Gate()
    site.decode.does(after(gate, says(200, ANSWER)))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(site.ask)
        site.decode.wait_asked()

        got = site.ask()

        gate.open()
        assert first.result().json() == ANSWER
    assert (got.status_code, got.json()["error"]["type"]) == (503, "busy")
    wait_until(lambda: site.metric("kvbus_proxy_in_flight 0.0"), "room again", WITHIN_S)
    assert site.ask().json() == ANSWER
    assert site.metric('kvbus_proxy_requests_total{outcome="completed"} 2.0')


# Conversations

FIRST = {"do_remote_decode": True}
TURN = {**TICKET, "do_remote_prefill": False, "do_remote_decode": True}
ANSWER_OF_TURN = {**ANSWER, "kv_transfer_params": TURN}


def shown(site: Site) -> list[Any]:
    """The params of each prefill request."""
    return [body["kv_transfer_params"] for body in site.prefill.bodies]


def test_the_next_turn_brings_once_what_the_answer_of_its_conversation_came_with(
    site: Site,
) -> None:
    site.decode.does(*[says(200, ANSWER_OF_TURN)] * 3, says(200, ANSWER))

    answers = [site.ask(conversation_id=name).json() for name in ("one", "other", "one", "one")]
    site.ask(conversation_id="one")
    site.ask()

    assert answers == [ANSWER_OF_TURN] * 3 + [ANSWER]
    assert shown(site) == [FIRST, FIRST, TURN, TURN, FIRST, FIRST]
    assert all("conversation_id" not in body for body in site.prefill.bodies + site.decode.bodies)


def test_the_next_prefill_server_is_not_sent_a_ticket_that_one_was(site: Site) -> None:
    site.decode.does(says(200, ANSWER_OF_TURN))
    site.ask(conversation_id="goes on")
    site.prefill.does(says(500, {}), offers())

    site.ask(conversation_id="goes on")

    assert shown(site) == [FIRST, TURN, FIRST]


@pytest.mark.parametrize(
    "answer",
    [
        says(200, b"no JSON"),
        says(200, {"kv_transfer_params": [TURN]}),
        says(200, {"kv_transfer_params": TICKET}),
        streams(b'data: {"kv_transfer_params": {"do_remote_decode": true}}\n\n'),
        breaks_off,
    ],
)
def test_an_answer_without_a_ticket_for_the_next_turn_leaves_none(
    site: Site, answer: Behaviour
) -> None:
    site.decode.does(answer)

    for _ in range(2):
        site.ask(conversation_id="leaves none")

    assert shown(site) == [FIRST, FIRST]


# With --overlap, both servers at once

OF_AGENT = Ticket("p", "boot", "tcp://10.0.0.1:7501", "e", "i", "o", "r", 3, 32 * "0").to_json()
LEARNT = {"do_remote_prefill": True, "ticket": OF_AGENT}
SIGNED = {**LEARNT, "ticket": {**OF_AGENT, "signature": 64 * "a"}}


@pytest.fixture
def knowing(site_of: Callable[..., Site]) -> Site:
    """A proxy with one prefill server, of which it has seen a ticket."""
    site = site_of("--overlap")
    closed = site.prefill.engines[1]
    closed.stop()
    wait_until(lambda: site.health()[closed.url] != "healthy", "it is missed", WITHIN_S)
    site.prefill.does(offers(LEARNT))
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
    assert to_prefill == {**FIRST, "transfer_id": met.transfer_id}
    assert (to_decode["do_remote_prefill"], met.endpoint) == (True, OF_AGENT["endpoint"])


def test_of_several_prefill_servers_each_is_asked_and_known(site_of: Callable[..., Site]) -> None:
    site = site_of("--overlap", "--grace", "2")  # not the one that knows
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


@pytest.mark.parametrize("params", [SIGNED, {"do_remote_prefill": True, "remote_host": "h"}])
def test_without_a_ticket_to_learn_from_all_goes_as_before(
    site_of: Callable[..., Site], params: Any
) -> None:
    site = site_of("--overlap", "--grace", "1")  # not the one that knows
    site.prefill.does(offers(params))

    for _ in range(4):
        site.ask()

    assert [body["kv_transfer_params"] for body in site.decode.bodies] == [params] * 4
