"""Each alert fires on its case, and not on usual metrics, and says what to do.

The metrics of alerts and of the Grafana board are on the pages of agents. promtool evaluates an
expression after some series of samples.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]  # no stubs among the dev dependencies
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import AgentProcess
from tests.support.engines import engine, failure_of

PROMTOOL = shutil.which("promtool")
MONITORING = Path(__file__).parents[3] / "deploy/kubernetes/components/monitoring"
GROUPS = yaml.safe_load((MONITORING / "alerts.yaml").read_text("utf-8"))["spec"]["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
BOARD = json.loads((MONITORING / "board.json").read_text("utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
VARIABLES = {"$namespace": "n", "$pod": "p", "$__rate_interval": "5m"}
RARE = {"kvbus_digests_total", "kvbus_undecided_fetches_total"}
"""They are on a page once they have happened."""
AFTER = "60m"

Series = Mapping[str, str]
"""A series with its labels, and its samples, one a minute, as promtool writes them."""


def promtool(*arguments: str | Path) -> tuple[int, str]:
    """Its exit status and output; skips the test where it is not installed."""
    if PROMTOOL is None:
        pytest.skip("needs promtool: make debian-packages")
    ended = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def check(folder: Path, *looks: tuple[Series, Mapping[str, int | None]]) -> str:
    """Return the complaints an hour after the series began.

    Each expression must give one sample of its value, or none for None.
    """
    rules = folder / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": GROUPS}))
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": k, "values": v} for k, v in series.items()],
            "promql_expr_test": [
                {
                    "expr": expression,
                    "eval_time": AFTER,
                    "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
                }
                for expression, value in wanted.items()
            ],
        }
        for series, wanted in looks
    ]
    tested = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(tested))
    status, said = promtool("test", "rules", folder / "tests.yaml")
    return said if status else ""


class Case(NamedTuple):
    """Series of an hour under which the alert fires, and under which it does not."""

    fires: dict[str, str]
    silent: dict[str, str]


def of_pod(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = "".join(f', {key}="{value}"' for key, value in labels.items())
    return {f'{name}{{namespace="n", pod="p"{inside}}}': values}


def shares(name: str, label: str, bad: str, good: str) -> Case:
    """Of a counter, a tenth under ``bad`` fires, and a hundredth does not."""
    fires = of_pod(name, "0+1x60", **{label: bad}) | of_pod(name, "0+9x60", **{label: good})
    silent = of_pod(name, "0+1x60", **{label: bad}) | of_pod(name, "0+99x60", **{label: good})
    return Case(fires, silent)


def lag(late: str, quick: str) -> dict[str, str]:
    """A histogram of 60 a minute, those below 10 ms, and those below 20."""
    name = "kvbus_event_loop_lag_seconds_bucket"
    return (
        of_pod(name, quick, le="0.01")
        | of_pod(name, late, le="0.02")
        | of_pod(name, "0+60x60", le="+Inf")
    )


CASES = {
    "KvbusAgentDown": Case(
        of_pod("up", "1x50 0x10", job="kvbus/kvbus"), of_pod("up", "1x58 0x2", job="kvbus/kvbus")
    ),
    "KvbusHandoffsFail": shares("kvbus_handoffs_total", "outcome", "failed", "completed"),
    "KvbusWrongBytes": Case(
        of_pod("kvbus_digests_total", "0x55 1x5", outcome="different"),
        of_pod("kvbus_digests_total", "0+9x60", outcome="equal"),
    ),
    "KvbusBlocksQuarantined": Case(
        of_pod("kvbus_quarantined_blocks", "0x50 8x10"),
        of_pod("kvbus_quarantined_blocks", "0 8 8 0x57"),
    ),
    "KvbusDataProcessRestarts": Case(
        of_pod("kvbus_data_restarts", "0x30 5x30"), of_pod("kvbus_data_restarts", "0x30 1x30")
    ),
    "KvbusDataProcessDown": Case(
        of_pod("kvbus_data_running", "1x50 0x10"), of_pod("kvbus_data_running", "1x55 0x1 1x4")
    ),
    "KvbusPeersSilent": Case(
        of_pod("kvbus_silent_peers", "0x50 1x10"), of_pod("kvbus_silent_peers", "0x57 1x3")
    ),
    "KvbusTakesLate": Case(
        of_pod("kvbus_undecided_fetches_total", "0+1x60", code="timeout"),
        of_pod("kvbus_undecided_fetches_total", "0+1x60", code="peer_lost"),
    ),
    "KvbusOffersUnread": shares("kvbus_offers_total", "outcome", "expired", "completed"),
    "KvbusLeasesExpire": shares("kvbus_leases_total", "reason", "expired", "completed"),
    "KvbusBusy": Case(
        of_pod("kvbus_refusals_total", "0+1x60", code="busy"),
        of_pod("kvbus_refusals_total", "0+1x60", code="stale"),
    ),
    "KvbusLoopLag": Case(lag("0+60x60", "0+50x60"), lag("0+60x60", "0+60x60")),
    "KvbusKeysRefused": Case(
        of_pod("kvbus_refused_keys", "0x40 0+1x20"), of_pod("kvbus_refused_keys", "7x60")
    ),
}


def test_each_alert_fires_on_its_case_and_not_on_usual_metrics(tmp_path: Path) -> None:
    looks: list[tuple[Series, dict[str, int | None]]] = []
    for name in RULES:
        number = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        looks += [(CASES[name].fires, {number: 1}), (CASES[name].silent, {number: None})]

    assert check(tmp_path, *looks) == ""


def test_each_alert_says_what_to_do_and_the_linter_accepts_them(tmp_path: Path) -> None:
    for rule in RULES.values():
        assert rule["annotations"]["description"].endswith(".")
        assert "{{ $labels.pod }}" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": GROUPS}))

    status, output = promtool("check", "rules", "--lint=all", "--lint-fatal", rules)

    assert status == 0, output


async def scraped(prefill: AgentProcess, decode: AgentProcess) -> dict[str, str]:
    """The series of two agents after a handoff and a failed one, with the labels of a pod."""
    async with engine(prefill.attach) as source, engine(decode.attach) as target:
        blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
        for name in ("good", "gone"):
            offer = await source.prefill.offer(name, num_tokens=32, block_ids=blocks[0])
            if name == "gone":
                await offer.withdraw()
            fetch = target.decode.fetch(offer.ticket, num_tokens=32, block_ids=blocks[1])
            await (failure_of(fetch) if name == "gone" else fetch.ended)
            await offer.ended
    found = {}
    for agent in (prefill, decode):
        for family in text_string_to_metric_families(agent.page("/metrics")[1]):
            for sample in family.samples:
                labels = {**sample.labels, "namespace": "n", "pod": "p"}
                inside = ", ".join(f'{k}="{v}"' for k, v in labels.items())
                found[f"{sample.name}{{{inside}}}"] = f"{sample.value:.0f}+1x60"
    return found


def filled(expression: str) -> str:
    """The expression as Grafana sends it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:kvbus|process)_\w+", expression))


def labels_of(target: dict[str, Any]) -> set[str]:
    """The labels that it groups by, and those that it shows."""
    groups = re.findall(r"\bby \(([^)]*)\)", target["expr"])
    grouped = {label.strip() for group in groups for label in group.split(",")}
    return grouped | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))


@pytest.mark.anyio
async def test_metrics_of_board_and_alerts_are_on_pages_of_agents(
    prefill: AgentProcess, decode: AgentProcess, tmp_path: Path
) -> None:
    series = await scraped(prefill, decode)

    counts = {f"count({filled(target['expr'])}) > bool 0": 1 for target in TARGETS}
    complaint = check(tmp_path, (series, counts))

    assert complaint == ""
    for target in TARGETS:
        (metric,) = metrics_of(target["expr"])
        found = " ".join(key for key in series if key.startswith(f"{metric}{{"))
        assert labels_of(target) <= set(re.findall(r'(\w+)="', found)), target
    rules = [rule["expr"] for rule in RULES.values()]
    families = {key.partition("{")[0] for key in series}
    assert set().union(*map(metrics_of, rules)) - RARE <= families


def test_panels_have_ids_of_their_own_and_use_the_chosen_source() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert panel["datasource"]["uid"] == "${datasource}"
