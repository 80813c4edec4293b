"""Whoever connects to UCX over TCP owns the process: it listens on the named interfaces only."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbus.errors import KVBusError
from kvbus.spawn import free_port
from tests.agents import AgentProcess, Agents
from tests.decode.neighbours import neighbours
from tests.engines import works
from tests.keyring import hand_over

pytestmark = pytest.mark.anyio

UCX_LISTENS_EVERYWHERE = """
import socket
import anyio
from kvbus.agent import DataPlane
from kvbus.transport import Transport
listener = socket.create_server(("0.0.0.0", 0))
anyio.run(DataPlane(("lo",), Transport("unopened")).{method})
"""


def ports_of(agent: AgentProcess) -> list[int]:
    said = agent.started
    endpoints = [said["peer"], said["events"], said["http"], *said["data"]]
    return [int(at.rpartition(":")[2]) for at in endpoints]


@pytest.mark.parametrize("method", ["check", "end_if_exposed"])
def test_a_process_that_listens_elsewhere_ends(method: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UCX_LISTENS_EVERYWHERE.format(method=method)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 1
    assert "UCX listens at 0.0.0.0:" in ended.stdout + ended.stderr


@pytest.mark.parametrize("events", ["[::1]", "localhost", "lo"])
def test_with_binds_of_loopback_ucx_listens_there_at_the_ports_that_are_named(
    fresh: Agents, events: str
) -> None:
    first = free_port()
    settings = {
        "peer_bind": "tcp://127.0.0.1:0",
        "events_bind": f"tcp://{events}:0",
        "data_ports": f"{first}-{first + 15}",
    }
    agent = fresh.prepare("prefill", env={}, mapped=False, **settings)
    fresh.start(agent)

    data = agent.started["data"]

    assert data
    assert all(at.rpartition(":")[0] in ("127.0.0.1", "::1") for at in data)
    assert all(int(at.rpartition(":")[2]) in range(first, first + 16) for at in data)
    assert agent.status()["data_endpoints"] == data


async def test_agents_of_one_machine_listen_at_no_port_of_ucx_until_one_cannot_map(
    fresh: Agents,
) -> None:
    prefill = fresh.prepare("prefill")
    decode = fresh.prepare("decode", mapped=True, calibrate=True)
    without = fresh.prepare("decode", mapped=False)
    fresh.start(prefill, decode, without)

    await hand_over(prefill, decode)
    while_mapped = {agent.role: listening_ports(agent) for agent in (prefill, decode)}
    await hand_over(prefill, without)

    assert while_mapped == {agent.role: set(ports_of(agent)) for agent in (prefill, decode)}
    assert listening_ports(prefill) > while_mapped["prefill"]
    (opened,) = prefill.says("data_plane.opened")
    assert prefill.status()["data_endpoints"] == opened["data"]
    assert listening_ports(decode) == while_mapped["decode"]


async def test_settings_that_ucx_does_not_take_are_named_when_it_is_needed(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill", env={"UCX_TLS": "bogus"})
    prefill.expected_trouble.add("data_plane.closed")
    without = fresh.prepare("decode", mapped=False)
    fresh.start(prefill, without)

    with pytest.raises(KVBusError, match=r"UCX does not start on .*UCX_TLS=bogus"):
        await hand_over(prefill, without)

    assert prefill.says("data_plane.closed")


def listening_ports(agent: AgentProcess) -> set[int]:
    """The TCP ports at which the process listens, as the kernel has them."""
    found = psutil.Process(agent.pid).net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


async def test_no_handshake_asks_each_descriptor_on_the_event_loop() -> None:
    asked_by = set[int]()

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name == "os.listdir" and str(args[0]) == "/proc/self/fd":
            asked_by.add(threading.get_ident())

    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        async with (
            neighbours(Path(folder), decode={"mapped": False}) as both,
            both.engines() as (source, target),
        ):
            sys.addaudithook(note)  # for good: it is as long as the process
            assert await works(source, target)

    assert asked_by
    assert threading.get_ident() not in asked_by
