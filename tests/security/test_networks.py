"""Hosts of strangers reach no port that they need not."""

from pathlib import Path

import pytest

from tests.agents import Agents
from tests.keyring import KeyRing
from tests.namespaces import HAVE_NAMESPACES, hosts, link
from tests.security.test_data_plane import ports_of

pytestmark = pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")


def test_a_stranger_on_another_host_reaches_no_port_of_a_local_agent(fresh: Agents) -> None:
    with hosts("server", "stranger") as made:
        server, stranger = made["server"], made["stranger"]
        link("kv0", one=(server, "10.211.0.1/24"), other=(stranger, "10.211.0.2/24"))
        agent = fresh.prepare("prefill")
        agent.runner = server.command
        fresh.start(agent)

        assert stranger.ports_open_at("10.211.0.1", ports_of(agent)) == []
        fresh.end()


def test_a_network_of_the_agents_keeps_strangers_from_the_data_plane(
    fresh: Agents, tmp_path: Path
) -> None:
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
            env={"UCX_NET_DEVICES": "front0"},  # the config goes first
            **KeyRing(tmp_path).settings("server"),
        )
        agent.runner = server.command
        fresh.start(agent)
        (data,) = [int(at.rpartition(":")[2]) for at in agent.started["data"]]

        assert other_agent.ports_open_at("10.211.2.1", [data]) == [data]
        assert client.ports_open_at("10.211.1.1", [7701, 7702, data]) == [7701, 7702]
        fresh.end()
