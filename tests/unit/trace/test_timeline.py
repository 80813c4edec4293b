"""All agents of a request on one clock: shares of time, failures, and the waterfall."""

import socket
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.clocks import ClockOffset
from kvbus.protocol import AgentRole, Span, Traced
from kvbus.trace.command import draw_waterfall, reasons
from kvbus.trace.timeline import UNKNOWN, AgentTrace, Timeline, failure_of

REASON = "forbidden: the prefill agent at tcp://10.193.143.1:7701 is not connected to: its key " + (
    "!kL&e*WOay4[.yv!X*qU]X=]P-)wsdXjye^grwMr is not trusted here with the role 'prefill'"
)
CANCELLED = "cancelled: the engine cancelled the fetch"
BAR = "█"


def agent(role: AgentRole, *spans: Span, offset_s: float = 0.0) -> AgentTrace:
    """The trace of an agent whose clock is behind ours by ``offset_s``; spans are of our clock."""
    behind = tuple(
        replace(one, start_s=one.start_s - offset_s, end_s=one.end_s and one.end_s - offset_s)
        for one in spans
    )
    answer = Traced(f"{role}-0", role, "boot", 0.0, 0.0, behind)
    return AgentTrace.of(f"tcp://{role}:1", answer, ClockOffset(offset_s, 0.0001))


prefill, decode = partial(agent, AgentRole.PREFILL), partial(agent, AgentRole.DECODE)


def timeline(*agents: AgentTrace) -> Timeline:
    return Timeline.of(agents, now_s=30.0)


# fmt: off
OFFER = (
    Span("offer", 0.0, 9.0), Span("open", 0.0, 4.0, 1), Span("sealed", 4.0, 9.0, 1),
    Span("leased", 2.0, 9.0, 1), Span("gathering", 5.0, 6.0, 2, "tile 1"),
)
FETCH = (
    Span("fetch", 1.0, 10.0), Span("acquiring", 1.0, 2.0, 1), Span("waiting", 2.0, 4.5, 1),
    Span("reading", 4.5, 9.0, 1), Span("packing", 4.5, 6.0, 2, "transfer 0"),
    Span("READ", 6.0, 8.5, 2, "transfer 0"), Span("READ", 6.5, 9.0, 2, "transfer 1"),
    Span("committing", 9.0, 10.0, 1),
)
# fmt: on
READ = prefill(*OFFER), decode(*FETCH)
UNREAD = prefill(Span("offer", 0.0, 22.837028), Span("sealed", 0.0, 22.837028, 1))


def failed_fetch(*, at_s: float = 22.0, reason: str = REASON) -> AgentTrace:
    """A fetch that fails in its second stage, 1.7 ms after it began."""
    return decode(
        Span("fetch", at_s, at_s + 0.0017, 0, "", reason),
        Span("resolving", at_s, at_s + 0.001, 1),
        Span("acquiring", at_s + 0.001, at_s + 0.0017, 1, "", reason),
    )


@pytest.mark.parametrize("offset_s", [0.0, 0.05, -12_345.5])
def test_shares_add_up_to_the_whole_whatever_the_clocks_say(offset_s: float) -> None:
    found = timeline(decode(*FETCH, offset_s=offset_s), decode(), prefill(*OFFER))
    assert [one.answer.role for one in found.agents] == ["prefill", "decode"]
    assert found.total_s == pytest.approx(10.0)
    assert found.shares() == pytest.approx(
        {
            "reading": 4.5,
            "waiting for prefill to compute": 2.5,
            "computing the prompt, before a decode engine requested it": 1.0,
            "waiting for the lease of the offer": 1.0,
            "confirming that the bytes are valid": 1.0,
        }
    )
    assert next(iter(found.shares())) == "reading"


@pytest.mark.parametrize(
    ("fetched", "offered", "shares"),
    [
        (
            [("fetch", 0, 6), ("sending", 0, 5, 1), ("reading", 5, 6, 1)],
            [("offer", 7, 8), ("sending", 7, 8, 1)],
            {
                "on the way from the decode engine to its agent": 5.0,
                "reading": 1.0,
                "on the way from the prefill engine to its agent": 1.0,
                UNKNOWN: 1.0,
            },
        ),
        (
            [("fetch", 5, 6), ("reading", 5, 6, 1), ("pending", 0, 5)],
            [("offer", 0, 5), ("sealed", 0, 5, 1)],
            {"waiting in the decode engine for its turn": 5.0, "reading": 1.0},
        ),
    ],
    ids=["ways between engine and agent", "waiting in the decode engine"],
)
def test_what_no_stage_of_an_agent_covers_is_named(
    fetched: list[tuple[Any, ...]], offered: list[tuple[Any, ...]], shares: dict[str, float]
) -> None:
    of_fetch, of_offer = ([Span(*one) for one in some] for some in (fetched, offered))
    assert timeline(decode(*of_fetch), prefill(*of_offer)).shares() == shares


COMPUTING = "computing the prompt, before a decode engine requested it"


@pytest.mark.parametrize(
    ("agents", "verdict"),
    [
        (READ, "45% of 10000.000 ms: reading, most of it READ (3000.000 ms)"),
        ((UNREAD, failed_fetch()), "100% of 22837.028 ms: ready, but nobody fetched it"),
        (
            (prefill(Span("offer", 27.5), Span("open", 27.5, None, 1)),),
            f"100% of 2500.000 ms: {COMPUTING}",
        ),
    ],
    ids=["largest", "unread", "open until now"],
)
def test_the_verdict_names_the_largest_share(agents: tuple[AgentTrace, ...], verdict: str) -> None:
    assert timeline(*agents).verdict() == verdict


@pytest.mark.parametrize(
    ("agents", "expected"),
    [
        (READ, ""),
        ((UNREAD, failed_fetch()), f"the fetch failed after 1.700 ms (acquiring): {REASON}"),
        (
            (UNREAD, failed_fetch(reason=CANCELLED)),
            f"the fetch was cancelled after 1.700 ms (acquiring): {CANCELLED}",
        ),
        (
            (failed_fetch(at_s=9.0), failed_fetch(at_s=3.0, reason="busy"), decode(*FETCH)),
            f"2 of 3 fetches failed, the last after 1.700 ms (acquiring): {REASON}",
        ),
        (
            (decode(Span("fetch", 0.0, 0.5, 0, "", "timeout: no answer")),),
            "the fetch failed after 500.000 ms: timeout: no answer",
        ),
    ],
    ids=["none", "one", "cancelled", "several", "without stages"],
)
def test_failure_has_time_place_and_reason(agents: tuple[AgentTrace, ...], expected: str) -> None:
    assert failure_of(timeline(*agents)) == expected


def test_each_reason_is_shown_once_with_the_innermost_span() -> None:
    transfer = Span("READ", 22.001, 22.0015, 2, "transfer 1", "transfer_failed: no route")
    told = reasons(timeline(decode(*failed_fetch().spans, transfer)))
    assert told == {REASON: "acquiring", "transfer_failed: no route": "READ transfer 1"}


def drawn(shown: Timeline, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(draw_waterfall(shown, width=width))
    lines = capture.get().splitlines()
    assert all(len(line) <= width and "…" not in line for line in lines)
    return lines


def test_each_span_has_name_times_and_bar_at_its_place() -> None:
    lines = {line.split()[0]: line for line in drawn(timeline(*READ)) if line.strip()}
    assert lines["waiting"].split()[1:3] == ["2000.000", "2500.000"]
    assert lines["waiting"].index(BAR) > lines["offer"].index(BAR)


def test_many_spans_that_are_alike_are_one_line() -> None:
    transfers = [Span("READ", 1.0 + n, 2.0 + n, 2, f"transfer {n}") for n in range(9)]
    spans = Span("fetch", 0.0, 10.0), Span("reading", 1.0, 10.0, 1), *transfers
    (line,) = [line for line in drawn(timeline(decode(*spans))) if "READ" in line]
    assert line.split()[:5] == ["READ", "x", "9", "1000.000", "9000.000"]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_long_reason_takes_no_room_from_names_and_numbers(width: int) -> None:
    lines = drawn(timeline(UNREAD, failed_fetch()), width)
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.strip()}
    assert rows["span"] == ["from", "ms"]
    assert rows["sealed"] == ["0.000", "22837.028"]
    assert rows["acquiring"] == ["22001.000", "0.700"]
    assert {"prefill", "decode"} <= rows.keys()


def test_unanswered_trace_warns_with_status_1_bad_endpoint_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(app, ["trace", "r", "--peer", endpoint, "--timeout", "0.1"])
        refused = CliRunner().invoke(app, ["trace", "r", "--peer", "nowhere"])
    warning, error = result.stderr.splitlines()
    assert (result.exit_code, refused.exit_code) == (1, 2)
    assert warning.startswith(f"warning: {endpoint}: timeout: ")
    assert error.startswith("error: no agent answered")
    assert "nowhere" in refused.stderr
