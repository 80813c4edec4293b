"""What an agent tells is what the page of documents says: every metric, and no other."""

import json
import re
import time
from pathlib import Path

from kvbus.agent.http.routes import LIVE_S

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
PROCESS = "process_"
"""Those of the process are prometheus_client's, and only named in part."""
OF_COLLECTORS = {"kvbus_otlp_handoffs", "kvbus_otlp_dropped"}
"""There are these only with ``otlp_endpoint``."""


def documented() -> set[str]:
    """The names of metrics in the first cells of the table."""
    table = PAGE.read_text().partition("## Metrics\n")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`(kvbus_\w+)", cell)}


def test_every_metric_of_both_agents_is_documented_and_no_other(prefill, decode):
    pages = [agent.page("/metrics")[1] for agent in (prefill, decode)]
    served = {
        name if kind != "counter" else name.removesuffix("_total") + "_total"
        for page in pages
        for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
        if not name.startswith(PROCESS) and not name.endswith("_created")
    }

    assert served | OF_COLLECTORS == documented()


def test_who_asks_for_live_again_and_again_is_told_the_same_for_a_moment(prefill):
    began = time.monotonic()
    told = {json.loads(prefill.page("/live")[1])["now_s"] for _ in range(30)}
    took_s = time.monotonic() - began

    assert len(told) <= 1 + took_s / LIVE_S


def test_every_event_that_is_logged_is_documented():
    root = PAGE.parents[1]
    sources = [p for room in ("kvbus/agent", "services") for p in (root / room).rglob("*.py")]
    logged = {
        event
        for path in sources
        for event in re.findall(
            r"(?:log|level|lines|_lines)\.(?:debug|info|warning|error|critical|exception|write)"
            r'\(\s*"([a-z_]+\.[a-z_]+)"',
            path.read_text(),
        )
    }
    text = PAGE.read_text()

    assert len(logged) > 30
    assert {event for event in logged if f"`{event}`" not in text} == set()
