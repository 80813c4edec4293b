"""The Grafana board: what it asks for, and what alerts ask for, is on the pages of agents."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from tests.agents import AgentProcess, Agents, agents_ended
from tests.deploy.promtool import MONITORING, alert_groups, check, series_of
from tests.engines import engine, failure_of

BOARD = json.loads((MONITORING / "board.json").read_text("utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = {"$namespace": "n", "$pod": "p", "$__rate_interval": "5m"}
AT = "30m"


@pytest.fixture
def agents() -> Iterator[Agents]:
    """A prefill and a decode agent."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode"))
        yield agents


async def work(prefill: AgentProcess, decode: AgentProcess) -> None:
    """A handoff that completes, one that fails, and a lease that ends."""
    async with (
        engine(PrefillSession, prefill.attach) as source,
        engine(DecodeSession, decode.attach) as target,
    ):
        blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
        for name in ("good", "gone"):
            offer = await source.prefill.offer(name, num_tokens=32, block_ids=blocks[0])
            if name == "gone":
                await offer.withdraw()
            fetch = target.decode.fetch(offer.ticket, num_tokens=32, block_ids=blocks[1])
            await (failure_of(fetch) if name == "gone" else fetch.completed())
            await offer.released()


def page(agent: AgentProcess) -> str:
    return agent.page("/metrics")[1]


def filled(expression: str) -> str:
    """The expression as Grafana sends it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:kvbus|process)_\w+", expression))


def labels_of(expression: str) -> set[str]:
    """The labels that it groups by."""
    groups = re.findall(r"\bby \(([^)]*)\)", expression)
    return {label.strip() for group in groups for label in group.split(",")}


@pytest.mark.anyio
async def test_every_expression_finds_something_on_the_pages_of_agents(
    agents: Agents, tmp_path: Path
) -> None:
    await work(*agents.all)
    series = series_of(map(page, agents.all), namespace="n", pod="p")

    wanted = {f"count({filled(one)}) > bool 0": 1 for one in EXPRESSIONS}
    complaint = check(tmp_path, series, wanted, AT)

    assert complaint == ""
    for panel in PANELS:
        for target in panel["targets"]:
            (metric,) = metrics_of(target["expr"])
            found = " ".join(key for key in series if key.startswith(f"{metric}{{"))
            shown = labels_of(target["expr"]) | set(
                re.findall(r"{{(\w+)}}", target["legendFormat"])
            )
            assert shown <= set(re.findall(r'(\w+)="', found)), target


@pytest.mark.anyio
async def test_every_metric_of_an_alert_is_on_the_page_of_an_agent(agents: Agents) -> None:
    await work(*agents.all)
    families = {key.partition("{")[0] for key in series_of(map(page, agents.all))}
    rules = [rule for group in alert_groups()["groups"] for rule in group["rules"]]

    asked = {name for rule in rules for name in metrics_of(rule["expr"])}

    rare = {
        "kvbus_digests_total",
        "kvbus_undecided_fetches_total",
    }  # there, once they have happened
    assert asked - rare <= families


def test_an_expression_of_a_metric_that_is_not_there_is_found(tmp_path: Path) -> None:
    series = {'kvbus_fetches{namespace="n", pod="p"}': "0+1x60"}

    said = check(tmp_path, series, {"count(kvbus_fetchez) > bool 0": 1}, AT)

    assert "kvbus_fetchez" in said


def test_panels_do_not_overlap_and_ask_the_chosen_source() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        return {(x + i, y + j) for i in range(w) for j in range(h)}

    assert not any(cells(a) & cells(b) for a, b in combinations(BOARD["panels"], 2))
    assert all(max(x for x, _ in cells(panel)) < 24 for panel in BOARD["panels"])
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert panel["datasource"]["uid"] == "${datasource}"
