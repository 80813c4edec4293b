"""Rates and spreads of two looks, and nothing where nothing was."""

import math

import pytest
from msgspec import structs

from kvbus.console import text_of
from kvbus.lab.status.screen import Between, screen
from kvbus.protocol import AgentRole, AgentStatus, Live, PoolStatus

BOUNDS = (0.001, 0.01, 0.1, 1.0, math.inf)
STATUS = AgentStatus(
    agent_id="d", role=AgentRole.DECODE, engines={}, draining=False, counts={"fetches": 0}
)


def look(now_s: float, metrics: dict[str, float] | None = None, boot: str = "one") -> Live:
    return Live(STATUS, boot, now_s, metrics or {}, ())


def histogram(values: list[float], stage: str = "") -> dict[str, float]:
    """The samples of a histogram that has observed ``values``."""
    return {
        f'h_bucket{{stage="{stage}",le="{"+Inf" if math.isinf(bound) else bound}"}}': float(
            sum(value <= bound for value in values)
        )
        for bound in BOUNDS
    }


def test_spread_covers_values_between_looks_with_given_labels() -> None:
    before = look(1.0, histogram([0.5] * 100))
    now = look(2.0, histogram([0.5] * 100 + [0.005] * 10))
    stages = histogram([0.005], "a") | histogram([0.5], "b")

    between, ever = Between(now, before).spread("h"), Between(now).spread("h")
    one_stage = Between(look(1.0, stages)).spread("h", stage="b")

    assert between is not None
    assert ever is not None
    assert one_stage is not None
    assert 0.001 < between[0] < between[1] <= 0.01
    assert 0.1 < ever[0] <= 1.0
    assert 0.1 < one_stage[0] <= 1.0


def test_a_rate_counts_all_labels_that_are_not_given() -> None:
    ok, no = 'n_total{code="",outcome="ok"}', 'n_total{code="x",outcome="no"}'
    before = look(10.0, {ok: 1.0, no: 2.0, "other_total": 7.0})
    now = look(12.0, {ok: 5.0, no: 3.0, "other_total": 70.0})

    assert Between(now, before).rate("n_total") == 2.5
    assert Between(now, before).rate("n_total", outcome="no") == 0.5
    assert Between(now, before).rate("what_was_never_counted") == 0.0


@pytest.mark.parametrize(
    "before",
    [
        None,
        look(2.0, {"n_total": 5.0, **histogram(20 * [0.5])}, boot="other"),
        look(3.0, {"n_total": 9.0}),
    ],
    ids=["first", "other-process", "same"],
)
def test_there_is_no_rate_without_two_looks_at_one_process(before: Live | None) -> None:
    now = look(3.0, {"n_total": 9.0, **histogram([0.005])})

    spread = Between(now, before).spread("h")

    assert Between(now, before).rate("n_total") is None
    assert spread is not None
    assert 0.001 < spread[0] <= 0.01


def test_what_all_agents_do_stands_above_what_any_of_them_holds() -> None:
    prefill = structs.replace(STATUS, agent_id="p", role=AgentRole.PREFILL, counts={"offers": 1})
    before, now = look(1.0), look(2.0, {"kvbus_read_bytes_total": 5e5})
    views = {"p": Between(structs.replace(now, status=prefill), before), "d": Between(now, before)}

    rows = [line.split() for line in text_of(screen(views)).splitlines()]

    names = [row[0] for row in rows if row]
    assert names.index("read") < names.index("engines")
    assert ["read", "500", "kB/s"] in rows


def test_pools_are_shown_with_their_use_and_whether_the_engine_is_gone() -> None:
    pools = {
        f"parked-{number}": PoolStatus(f"p{number}", "one", 3 << 20, 1 << 20, 2, is_attached)
        for number, is_attached in enumerate((True, False))
    }
    status = structs.replace(STATUS, pools=pools)
    text = text_of(screen({"p": Between(structs.replace(look(1.0), status=status))}))

    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "pool of p0 2 offers, 1 MiB of 3 MiB" in lines
    assert "pool of p1 2 offers, 1 MiB of 3 MiB; the engine is gone" in lines
