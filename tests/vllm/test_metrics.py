"""vLLM's page has kvbus' figures by outcome and stage."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import REGISTRY

from kvbus.integrations.vllm.metrics import KvbusPromMetrics, KvbusStats
from kvbus.integrations.vllm.stats import StatsRecorder
from kvbus.protocol import Fetched, Outcome, StageTimes
from tests.agents import wait_until
from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.servers import VllmServer
from tests.vllm.shapes import UP

SHAPE = UP


def test_every_figure_comes_to_the_page_under_the_engine_that_it_is_of() -> None:
    recorder = StatsRecorder()
    recorder.add_load(
        Fetched("f", "r", Outcome.FAILED, "reading", True, stages_s=StageTimes(reading=0.5))
    )
    recorder.add_refused_load("requested")
    figures = KvbusStats(data=recorder.take() or {})
    metrics = KvbusPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )

    metrics.observe(figures.to_dict(), engine_idx=1)

    page = generate_latest(REGISTRY).decode()
    for line in (
        'vllm:kvbus_loads_total{engine="1",outcome="failed"} 2.0',
        'vllm:kvbus_loads_total{engine="0",outcome="failed"} 0.0',
        'vllm:kvbus_loads_failed_total{engine="1",stage="reading"} 1.0',
        'vllm:kvbus_loads_failed_total{engine="1",stage="requested"} 1.0',
        'vllm:kvbus_loads_failed_total{engine="1",stage="confirming"} 0.0',
        'vllm:kvbus_load_stage_seconds_sum{engine="1",outcome="failed",stage="reading"} 0.5',
        'vllm:kvbus_offers_total{engine="0",outcome="expired"} 0.0',
        'vllm:kvbus_offered_tokens_total{engine="0"} 0.0',
    ):
        assert line in page.splitlines()
    assert figures.reduce()["KV loads failed, reading"] == 1


def after_a_step(server: VllmServer, name: str, **labels: str) -> float:
    """A figure on the page, which is as of the last step."""
    server.complete([1], 1)
    return server.metric(name, **labels)


def test_loads_and_offers_are_on_the_pages_of_both_servers(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=1)
    offered = after_a_step(pair.prefill, "kvbus_offers_total", outcome="completed")
    pair.handoff(prompt)
    wait_until(
        lambda: after_a_step(pair.prefill, "kvbus_offers_total", outcome="completed") > offered,
        "the offer is counted",
    )

    refused = after_a_step(pair.decode, "kvbus_loads_failed_total", stage="requested")
    failed = pair.decode.metric("kvbus_loads_total", outcome="failed")
    assert pair.redeem(prompt_of(200, seed=2), pair.ticket(prompt))  # of another prompt: refused
    wait_until(
        lambda: (
            after_a_step(pair.decode, "kvbus_loads_failed_total", stage="requested") == refused + 1
        ),
        "the failure is counted",
    )
    assert pair.decode.metric("kvbus_loads_total", outcome="completed") >= 1
    assert pair.decode.metric("kvbus_loads_total", outcome="failed") == failed + 1
    for stage in ("resolving", "reading", "confirming"):
        labels = {"stage": stage, "outcome": "completed"}
        assert pair.decode.metric("kvbus_load_stage_seconds_count", **labels) >= 1
