"""Which servers are healthy, who is told of it, and what the proxy counts."""

from tests.agents import wait_until
from tests.integrations.proxy.conftest import Logs, StartEngine, StartProxy
from tests.integrations.proxy.engines import WITHIN_S, Engine, Gate, offers, says

ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40}


def test_the_proxy_is_healthy_with_one_healthy_server_of_each_kind(
    proxy: StartProxy, engine: StartEngine, prefill: Engine, decode: Engine
) -> None:
    ill = engine(offers())
    ill.health = 503

    got = proxy([ill, prefill], [decode]).get("/health")

    assert got.status_code == 200
    assert got.json() == {
        "ready": True,
        "prefill": {ill.url: "/health answered 503", prefill.url: "healthy"},
        "decode": {decode.url: "healthy"},
    }


def test_the_proxy_says_which_server_is_missing(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    decode.stop()

    got = proxy([prefill], [decode]).get("/health")

    assert got.status_code == 503
    assert got.json()["ready"] is False
    assert got.json()["prefill"] == {prefill.url: "healthy"}
    assert "connection" in got.json()["decode"][decode.url].lower()


def test_the_proxy_is_not_healthy_without_a_prefill_server(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    prefill.health = 500

    assert proxy([prefill], [decode]).get("/health").status_code == 503


def test_a_server_that_does_not_answer_in_time_is_not_healthy(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    decode.health_gate = Gate()

    got = proxy([prefill], [decode], health_timeout_s=1.0).get("/health")

    assert got.json()["decode"] == {decode.url: "/health: ReadTimeout"}


def test_a_server_that_is_ill_gets_no_requests_until_it_is_well_again(
    proxy: StartProxy, engine: StartEngine, prefill: Engine, decode: Engine, logs: Logs
) -> None:
    ill = engine(offers())
    ill.health = 503
    client = proxy([ill, prefill], [decode], health_interval_s=0.05)
    for _ in range(2):
        client.post("/v1/completions", json=ASKED)
    while_ill = len(ill.asked)

    ill.health = 200
    wait_until(
        lambda: client.get("/health").json()["prefill"][ill.url] == "healthy", "well", WITHIN_S
    )
    for _ in range(2):
        client.post("/v1/completions", json=ASKED)

    assert (while_ill, len(ill.asked)) == (0, 1)
    assert [line["server"] for line in logs.of("server.lost")] == [ill.url]
    assert logs.of("server.found")[-1]["server"] == ill.url


def test_a_server_that_was_closed_is_used_again_when_it_listens_again(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    client = proxy([prefill], [decode], health_interval_s=0.05)
    decode.stop()
    wait_until(lambda: client.get("/health").status_code == 503, "lost", WITHIN_S)

    decode.start()
    wait_until(lambda: client.get("/health").status_code == 200, "found", WITHIN_S)

    assert client.post("/v1/completions", json=ASKED).status_code == 200


def test_models_are_those_of_a_decode_server(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    decode.models = {"data": [{"id": "the-decode-servers"}]}

    got = proxy([prefill], [decode]).get("/v1/models")

    assert (got.status_code, got.json()) == (200, decode.models)


def test_models_are_asked_of_the_next_decode_server_when_one_is_closed(
    proxy: StartProxy, prefill: Engine, engine: StartEngine, decode: Engine
) -> None:
    closed = engine(says(200, {}))
    client = proxy([prefill], [closed, decode])
    closed.stop()

    assert client.get("/v1/models").json() == decode.models


def test_models_without_a_decode_server_are_503(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    decode.health = 500

    got = proxy([prefill], [decode]).get("/v1/models")

    assert (got.status_code, got.json()["error"]["type"]) == (503, "no_decode_server")


def test_the_metrics_count_requests_by_outcome(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    client = proxy([prefill], [decode])
    client.post("/v1/completions", json=ASKED)
    client.post("/v1/completions", content=b"{")

    lines = client.get("/metrics").text.splitlines()

    assert 'kvbus_proxy_requests_total{outcome="completed"} 1.0' in lines
    assert 'kvbus_proxy_requests_total{outcome="refused"} 1.0' in lines
    assert 'kvbus_proxy_requests_total{outcome="failed"} 0.0' in lines
    assert "kvbus_proxy_in_flight 0.0" in lines


def test_other_paths_and_methods_are_not_served(
    proxy: StartProxy, prefill: Engine, decode: Engine
) -> None:
    client = proxy([prefill], [decode])

    assert client.post("/v1/embeddings", json=ASKED).status_code == 404
    assert client.get("/v1/completions").status_code == 405
