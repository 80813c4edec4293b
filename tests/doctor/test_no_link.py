"""A machine whose interface has no link: `kvbus doctor` says so, and an agent that cannot start."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import HAVE_NAMESPACES, Host, hosts, run_ip

pytestmark = pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")

INTERFACE, ADDRESS, ELSEWHERE = "kv9", "10.99.0.1", "tcp://10.99.0.2:7701"
CONFIG = f"""
agent_id = "one"
peer_bind = "tcp://127.0.0.1:0"
events_bind = "tcp://127.0.0.1:0"
data_interfaces = ["{INTERFACE}"]
"""
KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]


@pytest.fixture
def host() -> Iterator[Host]:
    """A machine with one interface, which is down."""
    with hosts("alone") as made:
        made["alone"].add_interface(INTERFACE, ADDRESS)
        run_ip("-n", made["alone"].name, "link", "set", INTERFACE, "down")
        yield made["alone"]


def doctor(host: Host, config: Path) -> dict[str, dict[str, Any]]:
    options = ["--only", "agents", "--only", "peer", "--json", "--config", str(config)]
    done = subprocess.run(
        [*host.command, *KVBUS, "doctor", *options, "--peer", ELSEWHERE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return {one["name"]: one for one in json.loads(done.stdout)["findings"]}


def test_an_interface_that_is_down_is_found_and_the_peer_is_not_blamed(
    host: Host, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)

    found = doctor(host, config)

    interfaces, socket = found["agents.one.interfaces"], found["peer.socket"]
    assert (interfaces["severity"], socket["severity"]) == ("error", "error")
    assert interfaces["found"].endswith(f"without a link now: {INTERFACE}")
    assert "Network is unreachable" in socket["found"]
    assert "data_interfaces is down here" in socket["fix"]


def test_an_agent_that_cannot_start_says_which_interface_has_no_link(
    host: Host, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"{CONFIG}runtime_dir = '{tmp_path}'\n")
    agent = [sys.executable, "-c", "from kvbus_decode.__main__ import main; main()", str(config)]

    ended = subprocess.run(
        [*host.command, *agent], capture_output=True, text=True, check=False, timeout=60
    )

    assert ended.returncode == 1
    assert f"UCX does not start on data_interfaces = ['{INTERFACE}']" in ended.stderr
    assert f"no link: {INTERFACE}" in ended.stderr
    assert "Traceback" not in ended.stderr
