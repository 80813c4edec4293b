"""Rates and spreads of two looks, and nothing where nothing was."""

import math

import pytest

from kvbus.protocol import AgentRole, AgentStatus, Live
from kvbus.top.figures import Between, total

BOUNDS = (0.001, 0.01, 0.1, 1.0)
STATUS = AgentStatus(
    agent_id="d", role=AgentRole.DECODE, engines={}, draining=False, counts={"fetches": 0}
)


def look(now_s: float, metrics: dict[str, float] | None = None, boot: str = "one") -> Live:
    return Live(STATUS, boot, now_s, (), metrics or {}, ())


def histogram(name: str, values: list[float], **labels: str) -> dict[str, float]:
    """The samples of a histogram that has observed ``values``."""
    bounds = [*BOUNDS, math.inf]
    shown = "".join(f'{key}="{value}",' for key, value in labels.items())
    return {
        f'{name}_bucket{{{shown}le="{"+Inf" if math.isinf(bound) else bound}"}}': float(
            sum(value <= bound for value in values)
        )
        for bound in bounds
    }


def test_a_spread_is_of_what_came_between_two_looks() -> None:
    before = look(1.0, histogram("h", [0.5] * 100))
    now = look(2.0, histogram("h", [0.5] * 100 + [0.005] * 10))

    between, ever = Between(now, before).spread("h"), Between(now).spread("h")

    assert between is not None
    assert ever is not None
    assert 0.001 < between.p50 < between.p99 <= 0.01
    assert 0.1 < ever.p50 <= 1.0


def test_a_spread_of_one_label_leaves_out_the_others() -> None:
    metrics = histogram("h", [0.005], stage="a") | histogram("h", [0.5], stage="b")

    spread = Between(look(1.0, metrics)).spread("h", stage="b")

    assert spread is not None
    assert 0.1 < spread.p50 <= 1.0


def test_a_rate_counts_all_labels_that_are_not_given() -> None:
    names = [f'n_total{{code="{code}",outcome="{o}"}}' for code, o in (("", "ok"), ("x", "no"))]
    before = look(10.0, {**dict(zip(names, (1.0, 2.0), strict=True)), "other_total": 7.0})
    now = look(12.0, {**dict(zip(names, (5.0, 3.0), strict=True)), "other_total": 70.0})

    assert Between(now, before).rate("n_total") == 2.5
    assert Between(now, before).rate("n_total", outcome="no") == 0.5
    assert total(now.metrics, "n_total") == 8.0


@pytest.mark.parametrize("boot", [None, "other"])
def test_one_look_at_a_process_has_no_rates_and_the_spread_of_all_it_did(boot: str | None) -> None:
    now = look(3.0, {"n_total": 9.0, **histogram("h", [0.005])})
    seen = 20 * [0.5]
    before = None if boot is None else look(2.0, {"n_total": 5.0, **histogram("h", seen)}, boot)

    spread = Between(now, before).spread("h")

    assert Between(now, before).rate("n_total") is None
    assert spread is not None
    assert 0.001 < spread.p50 <= 0.01


def test_the_same_told_twice_has_no_rate() -> None:
    now = look(3.0, {"n_total": 9.0})

    assert Between(now, now).rate("n_total") is None


def test_what_an_agent_does_not_have_has_no_rate() -> None:
    assert Between(look(2.0), look(1.0)).rate("n_total") is None
