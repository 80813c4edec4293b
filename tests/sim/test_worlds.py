"""Whole worlds: random requests and faults, by seeds and drawn by Hypothesis."""

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.sim.cluster import D, Fault, FaultKind, P, cluster_of
from tests.sim.engine import Shape
from tests.sim.handoffs import Plan
from tests.sim.worlds import HND, LEAST_COMPLETED, RESTLESS, SORTS, Sort, cells, quick, simulate
from tests.support.examples import num_examples

pytestmark = pytest.mark.timeout(600)  # 15 s of CPU, on a machine that may have other work
LACKING = {
    "direct": quick(lacks=0.05),
    "packed": quick(decode=HND, lacks=0.05),
    "mapped": cells(decode=HND, lacks=0.05),
}
"""Some READs and threads cannot be started."""


@pytest.mark.parametrize("seed", range(num_examples(12, 6)))
@pytest.mark.parametrize("name", SORTS)
def test_bytes_and_ends_are_right_in_a_world(name: str, seed: int) -> None:
    cluster = simulate(SORTS[name], seed=100 + seed, num_handoffs=300)
    assert cluster.ledger.ends["completed"] > LEAST_COMPLETED


@pytest.mark.parametrize("name", LACKING)
def test_blocks_come_back_where_memory_is_lacking(name: str) -> None:
    cluster = simulate(Sort(settings=LACKING[name], **RESTLESS), seed=1, num_handoffs=200)
    assert cluster.world.num_lacking > 10
    assert cluster.ledger.ends["completed"] > LEAST_COMPLETED


@pytest.mark.parametrize(("name", "seed"), [("slow cells", 13), ("frozen", 8), ("compared", 13)])
def test_the_same_seed_is_the_same_world(name: str, seed: int) -> None:
    first, again = (simulate(SORTS[name], seed=seed, num_handoffs=60) for _ in range(2))
    assert first.ledger.ends == again.ledger.ends
    assert (first.world.now, first.world.num_steps) == (again.world.now, again.world.num_steps)


seconds = st.sampled_from([0.0, 0.001, 0.003, 0.01, 0.1, 1.0])
optional_seconds = st.none() | seconds
plans = st.builds(
    Plan,
    num_tokens=st.integers(1, 20),
    num_pieces=st.integers(1, 3),
    gap_s=seconds,
    fetch_after_s=optional_seconds,
    timeout_s=st.sampled_from([2.0, 20.0]),
    ttl_s=st.sampled_from([3.0, 20.0]),
    chunk_tokens=st.sampled_from([0, 4]),
    withdraw_after_s=optional_seconds,
    cancel_after_s=optional_seconds,
    gives_up_offer=st.booleans(),
)
faults = st.builds(
    Fault,
    kind=st.sampled_from(FaultKind),
    at_s=st.sampled_from([0.0, 0.001, 0.002, 0.004, 0.01, 0.05]),
    role=st.sampled_from([P, D]),
    lasts_s=st.sampled_from([0.01, 1.0, 5.0, 30.0]),
)
shapes = st.sampled_from([(Shape(), Shape()), (Shape(), HND), (HND, Shape(block_size=5))])


@examples(max_examples=num_examples(1200, 8))
@given(
    shapes=shapes,
    plans=st.lists(st.tuples(plans, seconds), min_size=1, max_size=4),
    faults=st.lists(faults, max_size=3),
    part_s=st.sampled_from([3e-4, 1e-2]),
    seed=st.integers(0, 1000),
)
def test_bytes_and_ends_are_right_under_any_requests_and_faults(
    shapes: tuple[Shape, Shape],
    plans: list[tuple[Plan, float]],
    faults: list[Fault],
    part_s: float,
    seed: int,
) -> None:
    settings = quick(prefill=shapes[0], decode=shapes[1], part_s=part_s)
    with cluster_of(settings, seed) as cluster:
        for plan, after_s in plans:
            cluster.give(plan, after_s)
        cluster.suffer(*faults)
