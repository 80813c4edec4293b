"""What is said of two agents that could map each other's memory."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.doctor.finding import Severity
from kvbus.doctor.sharing import sharing_findings
from kvbus.protocol import AgentRole, AgentStatus, Sharing
from tests.agents import AgentProcess, Agents, agents_ended

OK, NOTE, WARNING, ERROR = Severity
HERE = Sharing(machine="m", uid=7, mount_namespace="mnt:[1]", path="/run/p/memory.sock")
PREFILL = AgentStatus("p", AgentRole.PREFILL, {"e": True}, draining=False, counts={}, sharing=HERE)
DECODE = replace(PREFILL, agent_id="d", role=AgentRole.DECODE, sharing=replace(HERE, path=""))


def found(decode: AgentStatus, prefill: AgentStatus = PREFILL) -> tuple[Severity, str]:
    (finding,) = sharing_findings([prefill, decode])
    assert finding.name == "agents.d.maps.p"
    return finding.severity, finding.found


def sharing(**changes: object) -> AgentStatus:
    return replace(DECODE, sharing=replace(DECODE.sharing, **changes))


@pytest.mark.parametrize(
    ("decode", "severity", "text"),
    [
        (DECODE, OK, "open"),
        (sharing(engines={"e at p": "open"}), OK, "memory is mapped: 1"),
        (sharing(engines={"e at other": "no", "x at p": "no"}), OK, "no engine of it was read"),
        (sharing(engines={"e at p": "no agent at /x"}), WARNING, "no agent at /x"),
        (sharing(uid=8), WARNING, "uid 8"),
        (sharing(mount_namespace="mnt:[2]"), WARNING, "/run/p/memory.sock may not be there"),
        (sharing(mount_namespace="mnt:[2]", engines={"e at p": "open"}), OK, "mapped"),
        (sharing(machine="other"), NOTE, "different machines"),
        (sharing(closed="closed by config"), NOTE, "closed by config"),
        (replace(DECODE, sharing=None), NOTE, "version"),
    ],
)
def test_the_path_between_two_agents_is_open_or_the_reason_is_said(decode, severity, text) -> None:
    said = found(decode)

    assert said[0] is severity
    assert text in said[1]


def test_what_the_prefill_agents_config_closes_is_said_too() -> None:
    closed = replace(PREFILL, sharing=replace(HERE, closed="closed by the prefill agent"))

    assert found(DECODE, closed) == (NOTE, "closed by the prefill agent")


def test_each_prefill_agent_is_looked_at_with_each_decode_agent() -> None:
    names = [f"agents.{d}.maps.{p}" for p, d in product("pq", "de")]
    statuses = [
        *(replace(PREFILL, agent_id=name) for name in "pq"),
        *(replace(DECODE, agent_id=name) for name in "de"),
    ]

    assert [finding.name for finding in sharing_findings(statuses)] == names


texts = st.sampled_from(["", "one", "two"])
states = st.dictionaries(st.sampled_from(["e at p", "e at q"]), st.sampled_from(["open", "no"]))
places = st.builds(
    Sharing,
    machine=texts,
    uid=st.integers(0, 1),
    mount_namespace=texts,
    pid_namespace=texts,
    path=texts,
    closed=st.sampled_from(["", "closed"]),
    engines=states,
)


@given(st.none() | places, st.none() | places)
def test_a_complaint_has_a_reason_and_a_fix_whatever_the_agents_say(theirs, ours) -> None:
    pair = replace(PREFILL, sharing=theirs), replace(DECODE, sharing=ours)

    (finding,) = sharing_findings(pair)

    assert finding.found
    assert not finding.is_complaint or (finding.why and finding.fix)
    is_open = finding.severity is OK
    assert not (is_open and (theirs is None or ours is None or theirs.closed or ours.closed))


def doctor(*agents: AgentProcess) -> dict[str, dict[str, Any]]:
    """The findings about agents that run, by name."""
    configs = [word for one in agents for word in ("--config", str(one.folder / "config.toml"))]
    ended = CliRunner().invoke(app, ["doctor", "--only", "agents", "--json", *configs])
    return {one["name"]: one for one in json.loads(ended.stdout)["findings"]}


def test_doctor_and_status_ask_the_agents_that_run() -> None:
    with agents_ended(Agents) as agents:
        prefill, decode = agents.prepare("prefill"), agents.prepare("decode", mapped=True)
        closed = agents.prepare("decode", mapped=False)
        agents.start(prefill, decode, closed)

        findings = doctor(prefill, decode, closed)
        shown = CliRunner().invoke(app, ["status", prefill.peer]).stdout

    assert findings["agents.decode-1.maps.prefill-0"]["severity"] == "ok"
    said = findings["agents.decode-2.maps.prefill-0"]
    assert said["severity"] == "note"
    assert said["found"] == "closed by the decode agent's config (mapped = false)"
    assert "lends memory at" in shown
    assert "memory.sock" in "".join(shown.split())
