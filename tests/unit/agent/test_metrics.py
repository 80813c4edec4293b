"""What is counted in plain numbers is to Prometheus what its own metrics would be."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from kvbus.agent.observe import STAGE_BUCKETS_S, AgentMetrics
from tests.support.agents import until

Samples = set[tuple[str, tuple[tuple[str, str], ...], float]]
LASTED_S = st.sampled_from([*STAGE_BUCKETS_S, 0.0001, 0.3, 31.0]) | st.floats(1e-6, 60.0)


def samples(registry: CollectorRegistry, name: str) -> Samples:
    return {
        (one.name, tuple(sorted(one.labels.items())), one.value)
        for family in registry.collect()
        for one in family.samples
        if one.name.startswith(name) and not one.name.endswith("_created")
    }


@given(st.lists(st.tuples(st.sampled_from(["reading", "committing"]), LASTED_S), max_size=20))
def test_times_are_a_histogram_for_each_label(lasted: list[tuple[str, float]]) -> None:
    metrics, registry = AgentMetrics(), CollectorRegistry()
    times = metrics.times(
        "stage_seconds", "Of a stage.", label="stage", of=["reading", "committing"]
    )
    known = Histogram(
        "stage_seconds", "Of a stage.", ["stage"], buckets=STAGE_BUCKETS_S, registry=registry
    )
    by_stage = {stage: known.labels(stage) for stage in ("reading", "committing")}
    for stage, lasted_s in lasted:
        times.add({stage: lasted_s, "not begun": 0.0})
        by_stage[stage].observe(lasted_s)
    assert samples(metrics.registry, "stage_") == samples(registry, "stage_")


@pytest.mark.anyio
async def test_the_largest_lag_is_told_as_it_was() -> None:
    metrics = AgentMetrics()
    value = metrics.registry.get_sample_value
    watching = asyncio.create_task(metrics.watch_loop_lag())
    await asyncio.sleep(0)
    time.sleep(0.7)  # noqa: ASYNC251 - it holds the loop up
    await until(lambda: (value("kvbus_event_loop_lag_seconds_count") or 0) > 1)
    watching.cancel()
    largest_s = value("kvbus_event_loop_largest_lag_seconds") or 0.0
    assert 0.5 < largest_s <= (value("kvbus_event_loop_lag_seconds_sum") or 0.0)
