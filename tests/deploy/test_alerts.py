"""Each alert fires on what it is for, and not on what is usual; each has a page of what to do."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.deploy.manifests import ROOT
from tests.deploy.promtool import alert_groups, check, promtool

RULES = {rule["alert"]: rule for group in alert_groups()["groups"] for rule in group["rules"]}
PAGE = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
AT = "60m"


class Case(NamedTuple):
    """Series of an hour under which the alert fires, and under which it does not."""

    fires: dict[str, str]
    silent: dict[str, str]


def of_pod(name: str, values: str, **labels: str) -> dict[str, str]:
    """A series of a pod."""
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
    "KvbusTransportRecycled": Case(
        of_pod("kvbus_recycled_transports", "0x30 1x30"),
        of_pod("kvbus_recycled_transports", "3x60"),
    ),
    "KvbusPeersSilent": Case(
        of_pod("kvbus_silent_peers", "0x50 1x10"), of_pod("kvbus_silent_peers", "0x57 1x3")
    ),
    "KvbusConfirmsLate": Case(
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


def alerts(name: str) -> str:
    """An expression: how many of these alerts fire."""
    return f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    assert check(tmp_path, {}, {}, AT) == ""

    status, said = promtool("check", "rules", "--lint=all", "--lint-fatal", tmp_path / "rules.yaml")

    assert status == 0, said


@pytest.mark.parametrize("name", RULES)
def test_an_alert_fires_on_what_it_is_for(tmp_path: Path, name: str) -> None:
    assert check(tmp_path, CASES[name].fires, {alerts(name): 1}, AT) == ""


@pytest.mark.parametrize("name", RULES)
def test_an_alert_is_silent_on_what_is_usual(tmp_path: Path, name: str) -> None:
    assert check(tmp_path, CASES[name].silent, {alerts(name): None}, AT) == ""


@pytest.mark.parametrize("name", RULES)
def test_an_alert_has_its_page_and_says_which_pod(name: str) -> None:
    rule: dict[str, Any] = RULES[name]

    assert f"\n## {name}\n" in PAGE
    assert "{{ $labels.pod }}" in rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_page_is_of_these_alerts_alone() -> None:
    assert re.findall(r"\n## (\w+)\n", PAGE) == list(RULES)
