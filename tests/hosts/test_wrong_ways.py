"""Addresses, interfaces and packets that do not come there: each is named, in time, with a way out.

`kvbus doctor --peer`, run on a host of the same network, names it as well.
"""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.keys import Role
from tests.agents import AgentProcess, until
from tests.engines import Engine, engine, failure_of, works
from tests.hosts.conftest import Network
from tests.keyring import OBSERVER

pytestmark = [pytest.mark.anyio, pytest.mark.long]

DEADLINE_S, LATE_S = 6.0, 5.0
LEADS_NOWHERE, NOBODY = "kv9", "10.99.0.1"
MTU = 1300
KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]


@contextmanager
def beside(network: Network, role: Role, name: str, **settings: Any) -> Iterator[AgentProcess]:
    """Another agent of a host, until the end of the ``with``."""
    agent = network.prepare_at(role, name, first_port=7721, **settings)
    try:
        agent.start()
        yield agent
    finally:
        agent.ask_to_end()
        agent.end()


async def fails(source: Engine, target: Engine) -> FetchFailed:
    """How a fetch of a few blocks fails, within its deadline."""
    theirs, ours = source.some_blocks(5, 40), target.some_blocks(6, 40)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=40, block_ids=theirs)
    began_s = time.monotonic()
    fetch = target.decode.fetch(offer.ticket, num_tokens=40, block_ids=ours, timeout_s=DEADLINE_S)
    failure = await failure_of(fetch)
    assert time.monotonic() - began_s < DEADLINE_S + LATE_S
    await fetch.blocks_freed()
    await offer.withdraw()
    return failure


def doctor(network: Network, host: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The findings of ``kvbus doctor`` on a host, by name."""
    ended = subprocess.run(
        [*network.hosts[host].command, *KVBUS, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return {one["name"]: one for one in json.loads(ended.stdout)["findings"]}


def look_at(network: Network, host: str, agent: AgentProcess) -> dict[str, dict[str, Any]]:
    """What it says on ``host`` of an agent elsewhere."""
    keys = "--key-file", str(network.ring.secret_path(OBSERVER))
    server = "--server-key", str(agent.started["server_key"])
    return doctor(network, host, "--only", "peer", "--peer", agent.peer, *keys, *server)


async def test_doctor_finds_nothing_wrong_with_an_agent_that_can_be_read(network: Network) -> None:
    found = look_at(network, "d0", network.at["p0"])

    assert {one["name"]: one["severity"] for one in found.values()} == {
        "peer.socket": "ok",
        "peer.packets": "ok",
        "peer.data": "ok",
        "peer.clock": "ok",
        "peer.one_machine": "ok",
    }


@pytest.mark.parametrize("address", [NOBODY, "of nobody on the network"])
async def test_an_agent_advertises_an_address_that_the_reader_does_not_reach(
    network: Network, address: str
) -> None:
    if address != NOBODY:
        address = network.hosts["p0"].address.rpartition(".")[0] + ".99"
    with beside(network, Role.PREFILL, "p0", advertise_host=address) as wrong:
        wrong.started["peer"] = wrong.settings["peer_bind"]  # the tests reach it
        async with (
            engine(PrefillSession, wrong.attach, seed=1) as source,
            engine(DecodeSession, network.at["d0"].attach, seed=2) as target,
        ):
            failure = await fails(source, target)
        wrong.started["peer"] = f"tcp://{address}:7721"
        there = look_at(network, "d0", wrong)
        at_home = doctor(
            network, "p0", "--only", "agents", "--config", str(wrong.folder / "config.toml")
        )
        wrong.started["peer"] = wrong.settings["peer_bind"]

    assert failure.code is ErrorCode.PEER_UNREACHABLE
    assert f"no prefill agent answers at tcp://{address}:7721" in failure.message
    assert "advertise_host" in failure.message
    assert there["peer.socket"]["severity"] == "error"
    assert address in there["peer.socket"]["found"]
    assert "advertise_host" in there["peer.socket"]["fix"]
    named = at_home[f"agents.{wrong.settings['agent_id']}.advertise_host"]
    assert named["severity"] == "warning"
    assert address in named["found"]


async def test_the_data_of_an_agent_is_on_an_interface_that_leads_elsewhere(
    network: Network,
) -> None:
    network.hosts["p0"].add_interface(LEADS_NOWHERE, NOBODY)
    with beside(network, Role.PREFILL, "p0", data_interfaces=[LEADS_NOWHERE]) as wrong:
        async with (
            engine(PrefillSession, wrong.attach, seed=1) as source,
            engine(DecodeSession, network.at["d0"].attach, seed=2) as target,
        ):
            failure = await fails(source, target)
        found = look_at(network, "d0", wrong)

    assert failure.code is ErrorCode.TRANSFER_FAILED
    assert "data_interfaces" in failure.message
    assert found["peer.socket"]["severity"] == "ok"
    assert found["peer.data"]["severity"] == "error"
    assert NOBODY in found["peer.data"]["found"]
    assert "data_interfaces" in found["peer.data"]["fix"]


@contextmanager
def small_packets_from(network: Network, name: str) -> Iterator[None]:
    """Only packets that are smaller than the host knows leave it."""
    host = network.hosts[name]
    host.set_path_mtu(MTU, told=False)
    try:
        yield
    finally:
        host.set_path_mtu(1500)


async def test_a_link_that_drops_large_packets_is_thought_of(network: Network) -> None:
    prefill, decode = network.at["p0"], network.at["d0"]
    async with (
        engine(PrefillSession, prefill.attach, seed=1) as source,
        engine(DecodeSession, decode.attach, seed=2) as target,
        engine(DecodeSession, decode.attach, seed=3) as unknown,
    ):
        assert await works(source, target)
        with small_packets_from(network, "p0"):
            reading = await fails(source, target)
            meeting = await fails(source, unknown)
            found = look_at(network, "p0", decode)
            way_back = look_at(network, "d0", prefill)["peer.packets"]

        assert await works(source, unknown)
    assert (reading.stage, reading.code) == ("reading", ErrorCode.TIMEOUT)
    assert "(MTU)" in reading.message
    assert meeting.code is ErrorCode.PEER_UNREACHABLE
    assert "(MTU)" in meeting.message
    assert found["peer.socket"]["severity"] == "ok"
    assert found["peer.packets"]["severity"] == "error"
    assert "on the way there" in found["peer.packets"]["found"]
    assert "MTU" in found["peer.packets"]["fix"]
    assert "on the way back" in way_back["found"]


@contextmanager
def dead_name_server(network: Network, name: str) -> Iterator[None]:
    """Who starts on the host meanwhile asks a name server that says nothing."""
    host = network.hosts[name]
    folder = Path("/etc/netns") / host.name
    folder.mkdir(parents=True)
    nobody = host.address.rpartition(".")[0] + ".99"
    (folder / "resolv.conf").write_text(f"nameserver {nobody}\noptions timeout:30 attempts:1\n")
    try:
        yield
    finally:
        (folder / "resolv.conf").unlink()
        folder.rmdir()


async def test_a_name_server_that_says_nothing_holds_up_the_fetches_that_need_it_and_no_other(
    network: Network,
) -> None:
    with (
        dead_name_server(network, "d0"),
        beside(network, Role.PREFILL, "p0", advertise_host="prefill.example") as named,
        beside(network, Role.DECODE, "d0") as decode,
    ):
        named.started["peer"] = named.settings["peer_bind"]
        async with (
            engine(PrefillSession, named.attach, seed=1) as source,
            engine(PrefillSession, network.at["p1"].attach, seed=3) as elsewhere,
            engine(DecodeSession, decode.attach, seed=2) as target,
        ):
            offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
            fetch = target.decode.fetch(
                offer.ticket, num_tokens=16, block_ids={"full": [1]}, timeout_s=DEADLINE_S / 2
            )
            others_work = await works(elsewhere, target)
            was_waiting = fetch.notice is None
            failure = await failure_of(fetch)
            await until(lambda: named.status()["counts"]["offers"])
            await offer.withdraw()

    assert others_work
    assert was_waiting
    assert (failure.stage, failure.code) == ("resolving", ErrorCode.PEER_UNREACHABLE)
    assert "prefill.example" in failure.message
    assert "name server" in failure.message
