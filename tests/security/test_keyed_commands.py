"""Commands that ask agents with keys."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.agent import load_shared_config
from kvbus.cli import app
from kvbus.doctor.agents import agent_facts
from tests.agents import AgentProcess


@pytest.fixture
def prefill(keyed_prefill: AgentProcess) -> AgentProcess:
    return keyed_prefill


def kvbus(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_kvbus_status_asks_with_the_keys_of_its_options(ring, prefill) -> None:
    secret, server = str(ring.secret_path("any-observer")), ring.pair("prefill").public
    ring.pair("stranger")

    told = kvbus("status", prefill.peer, "--key-file", secret, f"--server-key={server}", "--json")
    without = kvbus("status", prefill.peer)
    half = kvbus("status", prefill.peer, "--key-file", secret)
    stranger = str(ring.secret_path("stranger"))
    refused = kvbus("status", prefill.peer, "--key-file", stranger, f"--server-key={server}")

    assert json.loads(told.stdout)["agent_id"] == prefill.settings["agent_id"]
    assert [one.exit_code for one in (without, half, refused)] == [1, 2, 1]
    assert "uses keys: ask it with a key of our own and its server key" in without.stderr
    assert "--server-key: needed as well" in half.stderr
    assert "refused our key" in refused.stderr


def test_kvbus_trace_asks_each_agent_with_its_own_key(ring, prefill, keyed_decode) -> None:
    secret = str(ring.secret_path("any-observer"))
    peers = ["--peer", prefill.peer, "--peer", keyed_decode.peer, "--key-file", secret]
    keys = [f"--server-key={ring.pair(name).public}" for name in ("prefill", "decode")]

    asked = kvbus("trace", "never", *peers, *keys)
    with_one_key = kvbus("trace", "never", *peers, keys[0])

    names = [agent.settings["agent_id"] for agent in (prefill, keyed_decode)]
    assert all(name in asked.stderr for name in names)
    assert "warning" not in asked.stderr
    assert with_one_key.exit_code == 2
    assert "given 1 times for 2 agents" in with_one_key.stderr


def test_kvbus_doctor_sees_that_an_agent_with_keys_runs(prefill) -> None:
    config = str(prefill.folder / "config.toml")

    facts = agent_facts(config, load_shared_config(Path(config)))

    assert facts.is_running
    assert facts.keys_error == ""
