"""Addresses, interfaces and packets that do not come there: each is named, in time, with a way out.

`kvbus doctor --peer`, run on a host of the same network, names it as well.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvbus.errors import ErrorCode, FetchFailed
from kvbus.protocol import Role
from tests.process.hosts.conftest import Network
from tests.support.agents import AgentProcess
from tests.support.engines import Engine, begin, engine, failure_of, pair, works
from tests.support.keyring import OBSERVER
from tests.support.namespaces import Host

pytestmark = [pytest.mark.anyio, pytest.mark.long]

DEADLINE_S, LATE_S = 6.0, 5.0
LEADS_NOWHERE, NOBODY = "kv9", "10.99.0.1"
MTU = 1300
LOOKED_AT = ("socket", "faults", "packets", "data", "clock", "one_machine")
KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
Findings = dict[str, dict[str, Any]]


@contextmanager
def beside(network: Network, role: Role, name: str, **settings: Any) -> Iterator[AgentProcess]:
    agent = network.prepare_at(role, name, first_port=7721, **settings)
    try:
        agent.start()
        agent.started["peer"] = agent.settings["peer_bind"]
        yield agent
    finally:
        agent.request_end()
        agent.end()


async def fails(source: Engine, target: Engine) -> FetchFailed:
    began_s = time.monotonic()
    handoff = await begin(source, target, timeout_s=DEADLINE_S)
    failure = await failure_of(handoff.fetch)
    assert time.monotonic() - began_s < DEADLINE_S + LATE_S
    await handoff.fetch.freed
    await handoff.offer.withdraw()
    await handoff.offer.ended
    return failure


def doctor(network: Network, host: str, *arguments: str) -> Findings:
    ended = subprocess.run(
        [*network.hosts[host].command, *KVBUS, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return {one["name"]: one for one in json.loads(ended.stdout)["findings"]}


def look_at(network: Network, host: str, agent: AgentProcess, at: str = "") -> Findings:
    keys = "--key-file", str(network.ring.secret_path(OBSERVER))
    server = "--server-key", str(agent.started["server_key"])
    return doctor(network, host, "--only", "peer", "--peer", at or agent.peer, *keys, *server)


def is_error(finding: dict[str, Any], *words: str, fix: str) -> bool:
    says = all(word in finding["found"] for word in words)
    return finding["severity"] == "error" and says and fix in finding["fix"]


@pytest.mark.parametrize("address", [NOBODY, ""], ids=["elsewhere", "of nobody on the network"])
async def test_fetch_fails_when_advertised_address_is_unreachable(
    network: Network, address: str
) -> None:
    address = address or nobody_beside(network.hosts["p0"])
    endpoint = f"tcp://{address}:7721"
    with beside(network, Role.PREFILL, "p0", advertise_host=address) as wrong:
        async with pair(wrong.attach, network.at["d0"].attach) as engines:
            failure = await fails(*engines)
        there = look_at(network, "d0", wrong, endpoint)
        config = str(wrong.folder / "config.toml")
        at_home = doctor(network, "p0", "--only", "agents", "--config", config)
    named = at_home[f"agents.{wrong.settings['agent_id']}.advertise_host"]
    assert failure.code is ErrorCode.PEER_UNREACHABLE
    assert f"no prefill agent answers at {endpoint}" in failure.message
    assert "advertise_host" in failure.message
    assert is_error(there["peer.socket"], address, fix="advertise_host")
    assert (named["severity"], address in named["found"]) == ("warning", True)


def nobody_beside(host: Host) -> str:
    return host.address.rpartition(".")[0] + ".99"


async def test_fetch_fails_when_data_interface_leads_elsewhere(network: Network) -> None:
    network.hosts["p0"].add_interface(LEADS_NOWHERE, NOBODY)
    with beside(network, Role.PREFILL, "p0", data_interfaces=[LEADS_NOWHERE]) as wrong:
        async with pair(wrong.attach, network.at["d0"].attach) as engines:
            failure = await fails(*engines)
        found = look_at(network, "d0", wrong)
    assert failure.code in (ErrorCode.TRANSFER_FAILED, ErrorCode.TIMEOUT)
    assert "data_interfaces" in failure.message
    assert found["peer.socket"]["severity"] == "ok"
    assert is_error(found["peer.data"], NOBODY, fix="data_interfaces")


async def test_a_link_that_drops_large_packets_is_thought_of(network: Network) -> None:
    prefill, decode, host = network.at["p0"], network.at["d0"], network.hosts["p0"]
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        engine(decode.attach, seed=3) as unknown,
    ):
        assert await works(source, target)
        healthy = look_at(network, "d0", prefill)
        host.set_path_mtu(MTU, told=False)
        try:
            reading = await fails(source, target)
            awaiting = await fails(source, unknown)
            found = look_at(network, "p0", decode)
            way_back = look_at(network, "d0", prefill)["peer.packets"]
        finally:
            host.set_path_mtu(1500)
        assert await works(source, unknown)
    assert healthy.keys() == {f"peer.{name}" for name in LOOKED_AT}
    of_tests_before = healthy.pop("peer.faults")
    assert {one["severity"] for one in healthy.values()} == {"ok"}, of_tests_before
    assert (reading.stage, reading.code) == ("reading", ErrorCode.TIMEOUT)
    assert awaiting.code is ErrorCode.PEER_UNREACHABLE
    assert all("(MTU)" in failure.message for failure in (reading, awaiting))
    assert found["peer.socket"]["severity"] == "ok"
    assert is_error(found["peer.packets"], "large packets are lost", fix="MTU")
    assert is_error(way_back, "large packets are lost", fix="MTU")
