"""UCX listens on the named interfaces only: a TCP connection to it controls the process."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from structlog.testing import capture_logs

from kvbus.agent.data_plane import DataPlane
from kvbus.errors import LocalError
from kvbus.spawn import free_port
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import begin, failure_of, hand_over_once, pair
from tests.support.keyring import KeyRing
from tests.support.namespaces import BRIDGED, HAVE_NAMESPACES, bridged
from tests.support.played_data import played

pytestmark = pytest.mark.anyio

OWN, OWN_ADDRESS = "kv9", "10.211.2.1"
"""An interface of the agents alone."""

UCX_LISTENS_EVERYWHERE = """
import anyio
from kvbus.agent.data_plane import DataPlane
from tests.support.played_data import played
async def look():
    await DataPlane(("lo",), played(("0.0.0.0", 7))).end_if_exposed()
anyio.run(look)
"""


def ports_of(agent: AgentProcess) -> list[int]:
    said = agent.started
    endpoints = [said["peer"], said["events"], said["http"], *said["data"]]
    return [int(at.rpartition(":")[2]) for at in endpoints]


def test_a_process_that_listens_elsewhere_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UCX_LISTENS_EVERYWHERE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "UCX listens at 0.0.0.0:" in ended.stdout + ended.stderr


@pytest.mark.parametrize("look", ["watch", "check_until_done"])
async def test_ucx_endpoints_are_looked_up_again_after_failed_look(
    monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    monkeypatch.setattr("kvbus.agent.data_plane.CHECK_AGAIN_S", 0.01)
    error = LocalError("no descriptor is left")
    plane = DataPlane(("lo",), played(("127.0.0.1", 7), errors=[error, error]))
    with capture_logs() as logged:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(getattr(plane, look))
            await until(lambda: plane.endpoints)
            tasks.cancel_scope.cancel()
    assert [line["event"] for line in logged] == 2 * ["data_plane.unseen"]
    assert plane.endpoints == ("127.0.0.1:7",)


def test_ucx_listens_on_loopback_binds_at_named_ports(fresh: Agents) -> None:
    first = free_port()
    ports = range(first, first + 32)
    for events in ("[::1]", "localhost", "lo"):
        binds: dict[str, Any] = {
            "peer_bind": "tcp://127.0.0.1:0",
            "events_bind": f"tcp://{events}:0",
        }
        fresh.prepare("prefill", mapped=False, data_ports=f"{ports[0]}-{ports[-1]}", **binds)
    fresh.start(*fresh.all)
    for agent in fresh.all:
        data = agent.started["data"]
        assert data
        assert all(at.rpartition(":")[0] in ("127.0.0.1", "::1") for at in data)
        assert all(int(at.rpartition(":")[2]) in ports for at in data)
        assert agent.status()["data_endpoints"] == data


async def test_ucx_port_opens_only_when_agent_of_machine_cannot_map(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill")
    decode = fresh.prepare("decode", mapped=True)
    without = fresh.prepare("decode", mapped=False)
    fresh.start(prefill, decode, without)
    await hand_over_once(prefill, decode)
    while_mapped = {agent.role: listening_ports(agent) for agent in (prefill, decode)}
    await hand_over_once(prefill, without)
    assert while_mapped == {agent.role: set(ports_of(agent)) for agent in (prefill, decode)}
    assert listening_ports(prefill) > while_mapped["prefill"]
    (opened,) = prefill.says("data_plane.opened")
    assert prefill.status()["data_endpoints"] == opened["data"]
    assert listening_ports(decode) == while_mapped["decode"]


async def test_settings_refused_by_ucx_are_named_when_it_is_needed(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill", env={"UCX_TLS": "bogus"})
    prefill.expected_trouble.add("data_plane.closed")
    without = fresh.prepare("decode", mapped=False)
    fresh.start(prefill, without)
    async with pair(prefill.attach, without.attach) as engines:
        handoff = await begin(*engines, timeout_s=3.0)
        failure = await failure_of(handoff.fetch)
        await handoff.offer.withdraw()
    assert re.search(r"UCX does not start on .*UCX_TLS=bogus", failure.message)
    assert prefill.says("data_plane.closed")


@pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")
def test_agents_own_network_keeps_strangers_from_data_plane(fresh: Agents, tmp_path: Path) -> None:
    with bridged("server", "stranger") as made:
        server, stranger = made["server"], made["stranger"]
        server.add_interface(OWN, OWN_ADDRESS)
        agent = fresh.prepare(
            "prefill",
            peer_bind="tcp://0.0.0.0:7701",
            events_bind="tcp://0.0.0.0:7702",
            advertise_host=server.address,
            data_interfaces=[OWN],
            env={"UCX_NET_DEVICES": BRIDGED},  # the config goes first
            **KeyRing(tmp_path).settings("server"),
        )
        agent.runner = server.command
        fresh.start(agent)
        (data,) = [int(at.rpartition(":")[2]) for at in agent.started["data"]]
        assert server.ports_open_at(OWN_ADDRESS, [data]) == [data]
        assert stranger.ports_open_at(server.address, [7701, 7702, data]) == [7701, 7702]
        fresh.end()


def listening_ports(agent: AgentProcess) -> set[int]:
    processes = map(psutil.Process, (agent.pid, agent.data_pid))
    found = [one for process in processes for one in process.net_connections("tcp")]
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
