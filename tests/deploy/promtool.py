"""Asks promtool what an expression gives after some series of samples, alerts included."""

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # no stubs among the dev dependencies
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.manifests import FOLDER

PROMTOOL = shutil.which("promtool")
MONITORING = FOLDER / "components" / "monitoring"
EVALUATED_EACH = "1m"
WITHIN_S = 60.0

Series = Mapping[str, str]
"""A series with its labels, and its samples, one a minute, as promtool writes them."""


def alert_groups() -> dict[str, Any]:
    """The rules as Prometheus reads them, without what is around them for its operator."""
    rule = yaml.safe_load((MONITORING / "alerts.yaml").read_text("utf-8"))
    return {"groups": rule["spec"]["groups"]}


def promtool(*arguments: str | Path) -> tuple[int, str]:
    """Its exit status and what it says; skips the test where it is not installed."""
    if PROMTOOL is None:
        pytest.skip("needs promtool: make debian-packages")
    ended = subprocess.run(
        [PROMTOOL, *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def check(folder: Path, series: Series, wanted: Mapping[str, int | None], at: str) -> str:
    """What is wrong: each expression is to give one sample of that value, or none for None."""
    rules = folder / "rules.yaml"
    rules.write_text(yaml.safe_dump(alert_groups()))
    tested = {
        "rule_files": [rules.name],
        "evaluation_interval": EVALUATED_EACH,
        "tests": [
            {
                "interval": EVALUATED_EACH,
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": at,
                        "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
                    }
                    for expression, value in wanted.items()
                ],
            }
        ],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(tested))
    status, said = promtool("test", "rules", folder / "tests.yaml")
    return said if status else ""


def series_of(pages: Iterable[str], **labels: str) -> dict[str, str]:
    """The samples of scraped pages as series that go on from there, one more each minute."""
    found = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                all_labels = {**sample.labels, **labels}
                inside = ", ".join(f'{k}="{v}"' for k, v in all_labels.items())
                found[f"{sample.name}{{{inside}}}"] = f"{sample.value:.0f}+1x60"
    return found
