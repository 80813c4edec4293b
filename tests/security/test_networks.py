"""Hosts of strangers reach no port that they need not, and a dead name server holds up nobody."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from kvbus.bus import ask_agent
from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Status
from tests.agents import Agents
from tests.engines import engine, failure_of
from tests.keyring import KeyRing
from tests.namespaces import HAVE_NAMESPACES, Host, hosts, link
from tests.security.test_data_plane import ports_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2"),
]
ANSWER_S = 2.0
"""Of milliseconds; ZeroMQ, left to resolve names itself, answers nobody for 5 s and more."""


@contextmanager
def dead_name_server(host: Host, address: str) -> Iterator[None]:
    """What runs on ``host`` asks this address for names."""
    folder = Path("/etc/netns") / host.name
    folder.mkdir(parents=True)
    (folder / "resolv.conf").write_text(f"nameserver {address}\n")
    try:
        yield
    finally:
        (folder / "resolv.conf").unlink()
        folder.rmdir()


async def test_an_agent_answers_while_the_name_in_a_ticket_is_looked_up(fresh: Agents) -> None:
    with hosts("decode", "silent") as made:
        link("kv0", one=(made["decode"], "10.211.3.1/24"), other=(made["silent"], "10.211.3.2/24"))
        prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
        decode.runner = made["decode"].command
        with dead_name_server(made["decode"], "10.211.3.9"):
            fresh.start(prefill, decode)
            async with (
                engine(PrefillSession, prefill.attach) as source,
                engine(DecodeSession, decode.attach) as target,
            ):
                blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
                offer = await source.prefill.offer("r", num_tokens=32, block_ids=blocks[0])
                ticket = {**offer.ticket, "endpoint": "tcp://prefill.example:7701"}
                fetch = target.decode.fetch(ticket, num_tokens=32, block_ids=blocks[1])
                endpoint = f"ipc://{decode.settings['runtime_dir']}/engine.sock"
                for _ in range(40):
                    await ask_agent(endpoint, Status(), timeout_s=ANSWER_S)
                    await anyio.sleep(0.1)
                failure = await failure_of(fetch)
                await offer.withdraw()
                await offer.released()
            fresh.end()

    assert failure.code is ErrorCode.PEER_UNREACHABLE
    assert "cannot resolve the host of tcp://prefill.example:7701" in failure.message


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
