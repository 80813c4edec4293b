"""Faults of an agent: present ones first, those of the last minutes with their time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client import Metric
from prometheus_client.registry import Collector

from kvbus.agent.status import OLD_S, current_faults
from kvbus.protocol import AgentRole, AgentStatus, Live, ProcessStatus, Span, Status
from tests.unit.prefill.inside import prefill_agent

NOW_S, WALL_S = 5_000.0, 1_700_000_000.0
PEER = "tcp://10.0.0.7:7701"


def faults(
    *errors: tuple[float, str], silent: dict[str, float] | None = None, **metrics: float
) -> list[tuple[str, str]]:
    """The faults of an agent; each of the last handoffs has its age in seconds, and an error."""
    fields: dict[str, Any] = {"engines": {}, "draining": False, "counts": {}}
    data = ProcessStatus("data", last_end="killed by SIGSEGV")
    status = AgentStatus(
        agent_id="d", role=AgentRole.DECODE, silent_peers=silent or {}, processes=(data,), **fields
    )
    recent = tuple(
        (Span(name="fetch", start_s=NOW_S - ago_s - 1, end_s=NOW_S - ago_s, error=error),)
        for ago_s, error in errors
    )
    live = Live(status=status, boot="b", now_s=NOW_S, metrics=metrics, recent=recent)
    return [(one.what, one.do) for one in current_faults(live, wall_s=WALL_S, key_options={})]


def test_failed_handoffs_report_time_of_last_one_unless_long_ago() -> None:
    ((what, _),) = faults((290.0, "timeout: the last"), (400.0, "timeout: the first"), (1.0, ""))
    assert what == "2 of the last 3 handoffs failed, last 5 min ago, with timeout: the last"
    assert not faults((OLD_S + 1, "timeout: t"), (OLD_S + 9, "busy: b"), (1.0, ""))


def test_a_data_process_that_ended_is_a_fault_for_some_minutes() -> None:
    ended: Any = {"kvbus_data_restarts": 2.0}
    ((what, _),) = faults(**ended, kvbus_data_end_timestamp_seconds=WALL_S - 42)
    assert "last 42 s ago (2 times since the start): killed by SIGSEGV" in what
    assert not faults(**ended, kvbus_data_end_timestamp_seconds=WALL_S - OLD_S)
    assert not faults(kvbus_data_restarts=0.0, kvbus_data_end_timestamp_seconds=0.0)


def test_present_faults_come_first_and_say_what_to_do() -> None:
    found = faults(
        (1.0, "timeout: t"),
        silent={PEER: 13.0, "tcp://h:1; reboot": 7.0},
        kvbus_quarantined_blocks=50.0,
        kvbus_data_end_timestamp_seconds=WALL_S,
    )
    words = ["has not answered for 13 s", "for 7 s", "50 blocks are withheld", "has ended"]
    words.append("handoffs failed")
    assert [word in what for word, (what, _) in zip(words, found, strict=True)] == 5 * [True]
    (_, (_, silent), (_, withheld), *_) = found
    assert silent.endswith("kvbus doctor --peer 'tcp://h:1; reboot'"), "one word of a shell"
    assert "quarantine_timeout_s" in withheld


class Collections(Collector):
    """Counts how often the registry is read."""

    number = 0

    def collect(self) -> Iterator[Metric]:
        self.number += 1
        yield from ()


@pytest.mark.anyio
async def test_faults_that_many_ask_for_at_once_are_found_a_few_times(tmp_path: Path) -> None:
    """Each search reads all metrics and the newest handoffs, for milliseconds of the loop."""
    async with prefill_agent(tmp_path) as agent, agent.reader() as reader:
        collections = Collections()
        agent.runtime.agent.metrics.registry.register(collections)
        collections.number = 0
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(reader.ask, Status(faults=True))
        told = await reader.ask(Status(faults=True))
    assert not told.faults
    assert 0 < collections.number < 50
