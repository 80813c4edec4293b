"""Each alert fires on its case, and not on usual metrics, and says what to do.

The metrics of alerts and of the Grafana board are on the pages of agents. promtool evaluates an
expression after some series of samples. All of it holds for agents that Prometheus scrapes by
address, and for those in Kubernetes. Prometheus itself runs with the example configuration.
"""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]  # no stubs among the dev dependencies
from prometheus_client.parser import text_string_to_metric_families

from docs.generate_alerts import MANIFEST, SOURCE, manifest
from kvbus.spawn import Child, free_port
from tests.support.agents import AgentProcess, Agents, wait_until
from tests.support.engines import engine, failure_of

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
EXAMPLE = SOURCE.with_name("prometheus.yml")
GROUPS = yaml.safe_load(SOURCE.read_text("utf-8"))["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
BOARD = json.loads(MANIFEST.with_name("board.json").read_text("utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
TARGETS_BY = {
    "address": {"job": "kvbus", "instance": "10.0.0.1:7703"},
    "pod": {"job": "n/kvbus", "instance": "p", "namespace": "n", "pod": "p"},
}
"""Labels of an agent that Prometheus scrapes by its address, and as a pod."""
TOKEN = "0123456789abcdef"
RARE = {"kvbus_digests_total", "kvbus_undecided_fetches_total"}
"""They are on a page once they have happened."""
AFTER = "60m"
by_all_targets = pytest.mark.parametrize("target", TARGETS_BY.values(), ids=TARGETS_BY)

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
    tested = {"rule_files": [str(SOURCE)], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(tested))
    status, said = promtool("test", "rules", folder / "tests.yaml")
    return said if status else ""


class Case(NamedTuple):
    """Series of an hour under which the alert fires, and under which it does not."""

    fires: dict[str, str]
    silent: dict[str, str]


def of_agent(name: str, values: str, **labels: str) -> dict[str, str]:
    """A series whose agent is chosen by `of_target`."""
    inside = "".join(f', {key}="{value}"' for key, value in labels.items())
    return {f"{name}{{TARGET{inside}}}": values}


def of_target(series: Series, target: Mapping[str, str]) -> Series:
    inside = ", ".join(f'{key}="{value}"' for key, value in target.items())
    return {key.replace("TARGET", inside): values for key, values in series.items()}


def shares(name: str, label: str, bad: str, good: str) -> Case:
    """Of a counter, a tenth under ``bad`` fires, and a hundredth does not."""
    fires = of_agent(name, "0+1x60", **{label: bad}) | of_agent(name, "0+9x60", **{label: good})
    silent = of_agent(name, "0+1x60", **{label: bad}) | of_agent(name, "0+99x60", **{label: good})
    return Case(fires, silent)


def lag(late: str, quick: str) -> dict[str, str]:
    """A histogram of 60 a minute, those below 10 ms, and those below 20."""
    name = "kvbus_event_loop_lag_seconds_bucket"
    return (
        of_agent(name, quick, le="0.01")
        | of_agent(name, late, le="0.02")
        | of_agent(name, "0+60x60", le="+Inf")
    )


CASES = {
    "KvbusAgentDown": Case(of_agent("up", "1x50 0x10"), of_agent("up", "1x58 0x2")),
    "KvbusHandoffsFail": shares("kvbus_handoffs_total", "outcome", "failed", "completed"),
    "KvbusWrongBytes": Case(
        of_agent("kvbus_digests_total", "0x55 1x5", outcome="different"),
        of_agent("kvbus_digests_total", "0+9x60", outcome="equal"),
    ),
    "KvbusBlocksQuarantined": Case(
        of_agent("kvbus_quarantined_blocks", "0x50 8x10"),
        of_agent("kvbus_quarantined_blocks", "0 8 8 0x57"),
    ),
    "KvbusDataProcessRestarts": Case(
        of_agent("kvbus_data_restarts", "0x30 5x30"), of_agent("kvbus_data_restarts", "0x30 1x30")
    ),
    "KvbusDataProcessDown": Case(
        of_agent("kvbus_data_running", "1x50 0x10"), of_agent("kvbus_data_running", "1x55 0x1 1x4")
    ),
    "KvbusPeersSilent": Case(
        of_agent("kvbus_silent_peers", "0x50 1x10"), of_agent("kvbus_silent_peers", "0x57 1x3")
    ),
    "KvbusCommitsLate": Case(
        of_agent("kvbus_undecided_fetches_total", "0+1x60", code="timeout"),
        of_agent("kvbus_undecided_fetches_total", "0+1x60", code="peer_lost"),
    ),
    "KvbusOffersUnread": shares("kvbus_offers_total", "outcome", "expired", "completed"),
    "KvbusLeasesExpire": shares("kvbus_leases_total", "reason", "expired", "completed"),
    "KvbusBusy": Case(
        of_agent("kvbus_refusals_total", "0+1x60", code="busy"),
        of_agent("kvbus_refusals_total", "0+1x60", code="stale"),
    ),
    "KvbusLoopLag": Case(lag("0+60x60", "0+50x60"), lag("0+60x60", "0+60x60")),
    "KvbusKeysRefused": Case(
        of_agent("kvbus_refused_keys", "0x40 0+1x20"), of_agent("kvbus_refused_keys", "7x60")
    ),
}


@by_all_targets
def test_each_alert_fires_on_its_case_and_not_on_usual_metrics(
    target: Mapping[str, str], tmp_path: Path
) -> None:
    looks: list[tuple[Series, dict[str, int | None]]] = []
    for name in RULES:
        labels = {"alertname": name, "alertstate": "firing", **target}
        firing = ", ".join(f'{key}="{value}"' for key, value in labels.items())
        number = f"count(ALERTS{{{firing}}})"
        fires, silent = (of_target(series, target) for series in CASES[name])
        looks += [(fires, {number: 1}), (silent, {number: None})]

    assert check(tmp_path, *looks) == ""


def test_each_alert_says_what_to_do_and_the_linter_accepts_them() -> None:
    for rule in RULES.values():
        assert rule["annotations"]["description"].endswith(".")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")

    status, output = promtool("check", "rules", "--lint=all", "--lint-fatal", SOURCE)

    assert status == 0, output


def test_the_rule_of_the_operator_has_these_alerts() -> None:
    assert MANIFEST.read_text("utf-8") == manifest(), "stale: run python docs/generate_alerts.py"
    assert yaml.safe_load(manifest())["spec"] == {"groups": GROUPS}


def write_example(folder: Path, *targets: str) -> Path:
    """The example with these agents, beside the rules and the token."""
    example = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    (job,) = example["scrape_configs"]
    (folder / job["authorization"]["credentials_file"]).write_text(TOKEN)
    for name in example["rule_files"]:
        shutil.copy(EXAMPLE.with_name(name), folder)
    if targets:
        job["static_configs"] = [{"targets": list(targets)}]
        example["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / EXAMPLE.name).write_text(yaml.safe_dump(example))
    return folder / EXAMPLE.name


def test_the_linter_accepts_the_example(tmp_path: Path) -> None:
    config = write_example(tmp_path)

    status, output = promtool("check", "config", "--lint=all", "--lint-fatal", config)

    assert status == 0, output


@contextmanager
def prometheus(config: Path) -> Iterator[str]:
    """The URL of its API; skips the test where it is not installed."""
    if PROMETHEUS is None:
        pytest.skip("needs prometheus: make debian-packages")
    address, data = f"127.0.0.1:{free_port()}", config.with_name("data")
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={address}",
    ]
    process = Child.start("prometheus", command, log=config.with_name("log"))
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.end(10)


def found(url: str) -> Any:
    """The data of an answer of the API; None until it listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - on loopback
            return json.load(answer)["data"]
    except OSError:
        return None


def test_prometheus_scrapes_agents_by_address_with_their_token(
    fresh: Agents, tmp_path: Path
) -> None:
    token = fresh.folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    agents = fresh.both(http_token_file=str(token))
    targets = [agent.settings["http_bind"] for agent in agents]

    with prometheus(write_example(tmp_path, *targets)) as api:
        url = f"{api}/query?query=kvbus_engines"
        wait_until(lambda: len((found(url) or {}).get("result", ())) == 2, "both are scraped")
        samples = [one["metric"] for one in found(url)["result"]]
        (group,) = found(f"{api}/rules")["groups"]

    assert sorted(one["instance"] for one in samples) == sorted(targets)
    assert {one["job"] for one in samples} == {"kvbus"}
    assert [rule["name"] for rule in group["rules"]] == list(RULES)


async def scraped(prefill: AgentProcess, decode: AgentProcess) -> dict[str, str]:
    """The series of two agents after a handoff and a failed one, for `of_target`."""
    async with engine(prefill.attach) as source, engine(decode.attach) as target:
        blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
        for name in ("good", "gone"):
            offer = await source.prefill.offer(name, num_tokens=32, block_ids=blocks[0])
            if name == "gone":
                await offer.withdraw()
            fetch = target.decode.fetch(offer.ticket, num_tokens=32, block_ids=blocks[1])
            await (failure_of(fetch) if name == "gone" else fetch.ended)
            await offer.ended
    series: dict[str, str] = {}
    for agent in (prefill, decode):
        for family in text_string_to_metric_families(agent.page("/metrics")[1]):
            for sample in family.samples:
                series |= of_agent(sample.name, f"{sample.value:.0f}+1x60", **sample.labels)
    return series


def filled(expression: str, target: Mapping[str, str]) -> str:
    """The expression as Grafana sends it."""
    for variable in ("job", "instance"):
        expression = expression.replace(f"${variable}", target[variable])
    return expression.replace("$__rate_interval", "5m")


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:kvbus|process)_\w+", expression))


def labels_of(target: dict[str, Any]) -> set[str]:
    """The labels that it groups by, and those that it shows."""
    groups = re.findall(r"\bby \(([^)]*)\)", target["expr"])
    grouped = {label.strip() for group in groups for label in group.split(",")}
    return grouped | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))


@by_all_targets
@pytest.mark.anyio
async def test_metrics_of_board_and_alerts_are_on_pages_of_agents(
    target: Mapping[str, str], prefill: AgentProcess, decode: AgentProcess, tmp_path: Path
) -> None:
    series = of_target(await scraped(prefill, decode), target)

    counts = {f"count({filled(one['expr'], target)}) > bool 0": 1 for one in TARGETS}
    complaint = check(tmp_path, (series, counts))

    assert complaint == ""
    labels = labels_by_metric(series)
    for one in TARGETS:
        (metric,) = metrics_of(one["expr"])
        assert labels_of(one) <= labels[metric], one
    for rule in RULES.values():
        assert metrics_of(rule["expr"]) - RARE <= labels.keys()
        for dropped, metric in re.findall(r"without \(([^)]*)\) \(rate\((\w+)", rule["expr"]):
            if metric not in RARE:
                assert set(dropped.split(", ")) | target.keys() == labels[metric], rule["alert"]


def labels_by_metric(series: Series) -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {}
    for key in series:
        labels.setdefault(key.partition("{")[0], set()).update(re.findall(r'(\w+)="', key))
    return labels


def test_panels_have_ids_of_their_own_and_use_the_chosen_source() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert panel["datasource"]["uid"] == "${datasource}"


def test_variables_of_the_board_are_labels_of_every_target() -> None:
    common = set.intersection(*map(set, TARGETS_BY.values()))
    source, *variables = BOARD["templating"]["list"]

    assert (source["name"], source["type"]) == ("datasource", "datasource")
    assert {one["name"] for one in variables} == common
    for one in variables:
        selected, label = re.findall(r"(?:{(.*)})?, (\w+)\)$", one["query"])[0]
        assert label == one["name"]
        assert set(re.findall(r"(\w+)=", selected)) <= common
