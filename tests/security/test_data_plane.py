"""Whoever connects to UCX over TCP owns the process: it listens on the named interfaces only."""

import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbus.agent import DataPlane, choose_interfaces
from kvbus.errors import ConfigError, KVBusError
from kvbus.spawn import free_port
from kvbus.transport import Transport
from kvbus_prefill.config import PrefillConfig
from tests.agents import AgentProcess, Agents
from tests.decode.neighbours import neighbours
from tests.engines import works
from tests.keyring import KeyRing, hand_over
from tests.namespaces import HAVE_NAMESPACES, hosts, link

pytestmark = pytest.mark.anyio

UCX_LISTENS_EVERYWHERE = """
import socket
import anyio
from kvbus.agent import DataPlane
from kvbus.transport import Transport
listener = socket.create_server(("0.0.0.0", 0))
anyio.run(DataPlane(("lo",), Transport("unopened")).{method})
"""
MANY_HOSTS = pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")
LOOPBACK, WILDCARD = "tcp://127.0.0.1:0", "tcp://0.0.0.0:0"


LISTENS = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
input()
"""


@contextmanager
def elsewhere() -> Iterator[int]:
    """A port at which another process of this machine listens."""
    command = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate(b"\n", timeout=60)


def config(**changes: Any) -> PrefillConfig:
    binds = {"agent_id": "p", "peer_bind": LOOPBACK, "events_bind": LOOPBACK}
    return PrefillConfig(**{**binds, **changes})


def ports_of(agent: AgentProcess) -> list[int]:
    said = agent.started
    endpoints = [said["peer"], said["events"], said["http"], *said["data"]]
    return [int(at.rpartition(":")[2]) for at in endpoints]


@pytest.mark.parametrize("bind", [LOOPBACK, "tcp://localhost:0", "tcp://[::1]:0", "tcp://lo:0"])
def test_binds_of_loopback_keep_ucx_on_loopback(bind, monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)

    assert choose_interfaces(config(peer_bind=bind, events_bind=bind)) == ("lo",)


@pytest.mark.parametrize("bind", ["peer_bind", "events_bind"])
@pytest.mark.parametrize("environment", ["", "all"])
def test_a_bind_that_others_reach_wants_the_interfaces_named(bind, environment, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", environment)

    with pytest.raises(ConfigError, match="'data_interfaces': needed"):
        choose_interfaces(config(**{bind: WILDCARD}, advertise_host="host"))


def test_the_config_names_them_before_the_environment(monkeypatch):
    here = next((name for name in psutil.net_if_addrs() if name != "lo"), "")
    if not here:
        pytest.skip("this machine has no interface but loopback")
    monkeypatch.setenv("UCX_NET_DEVICES", f"lo,{here}")
    exposed = config(peer_bind=WILDCARD, advertise_host="host")

    assert choose_interfaces(exposed) == ("lo", here)
    assert choose_interfaces(config(data_interfaces=(here,))) == (here,)


def test_an_interface_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"has no eth99, ib_7:1; it has .*lo"):
        choose_interfaces(config(data_interfaces=("lo", "eth99", "ib_7:1")))


@pytest.mark.parametrize("method", ["check", "end_if_exposed"])
def test_a_process_that_listens_elsewhere_ends(method):
    ended = subprocess.run(
        [sys.executable, "-c", UCX_LISTENS_EVERYWHERE.format(method=method)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 1
    assert "UCX listens at 0.0.0.0:" in ended.stdout + ended.stderr


def test_an_agent_says_where_ucx_listens(fresh: Agents):
    agent = fresh.prepare("prefill", mapped=False)
    fresh.start(agent)

    data = agent.started["data"]

    assert data
    assert all(at.startswith("127.0.0.1:") for at in data)
    assert agent.status()["data_endpoints"] == data


def test_ucx_listens_at_the_ports_that_the_config_names(fresh: Agents):
    first = free_port()
    agent = fresh.prepare("prefill", mapped=False, data_ports=f"{first}-{first + 15}")
    fresh.start(agent)

    ports = [int(at.rpartition(":")[2]) for at in agent.started["data"]]

    assert ports
    assert set(ports) <= set(range(first, first + 16))


async def test_agents_of_one_machine_listen_at_no_port_of_ucx_until_one_cannot_map(fresh: Agents):
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


async def test_settings_that_ucx_does_not_take_are_named_when_it_is_needed(fresh: Agents):
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


async def test_the_sockets_of_this_process_that_listen_are_found_and_no_others():
    inside = socket.create_server(("127.0.0.1", 0))
    at = inside.getsockname()
    plane = DataPlane(("lo",), Transport("unopened"), lambda: {ours.getsockname()[1]})
    with (
        inside,
        socket.create_server(("127.0.0.1", 0)) as ours,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.create_connection(at),
        socket.socket(socket.AF_UNIX) as unix,
        elsewhere() as other,
    ):
        unix.bind("")
        unix.listen()
        await plane.look()
        found = plane.endpoints

        assert f"127.0.0.1:{at[1]}" in found
        assert f"::1:{six.getsockname()[1]}" in found
        ports = [int(end.rpartition(":")[2]) for end in found]
        assert {other, ours.getsockname()[1]}.isdisjoint(ports)
        assert plane.outside == ""


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


@MANY_HOSTS
def test_a_stranger_on_another_host_reaches_no_port_of_a_local_agent(fresh: Agents):
    with hosts("server", "stranger") as made:
        server, stranger = made["server"], made["stranger"]
        link("kv0", one=(server, "10.211.0.1/24"), other=(stranger, "10.211.0.2/24"))
        agent = fresh.prepare("prefill")
        agent.runner = server.command
        fresh.start(agent)

        assert stranger.ports_open_at("10.211.0.1", ports_of(agent)) == []
        fresh.end()


@MANY_HOSTS
def test_a_network_of_the_agents_keeps_strangers_from_the_data_plane(fresh: Agents, tmp_path: Path):
    with hosts("server", "client", "agent") as made:
        server, client, other_agent = made["server"], made["client"], made["agent"]
        link("front0", one=(server, "10.211.1.1/24"), other=(client, "10.211.1.2/24"))
        link("kv0", one=(server, "10.211.2.1/24"), other=(other_agent, "10.211.2.2/24"))
        agent = fresh.prepare(
            "prefill",
            peer_bind="tcp://0.0.0.0:7701",
            events_bind="tcp://0.0.0.0:7702",
            advertise_host="10.211.1.1",
            data_interfaces=["kv0"],
            **KeyRing(tmp_path).settings("server"),
        )
        agent.runner = server.command
        fresh.start(agent)
        (data,) = [int(at.rpartition(":")[2]) for at in agent.started["data"]]

        assert other_agent.ports_open_at("10.211.2.1", [data]) == [data]
        assert client.ports_open_at("10.211.1.1", [7701, 7702, data]) == [7701, 7702]
        fresh.end()
