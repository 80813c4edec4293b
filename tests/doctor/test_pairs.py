"""``kvbus doctor --peer --from`` of agents that run: with engines, with keys, across a network."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from kvbus.engine import DecodeSession
from kvbus.keys import Role
from tests.agents import AgentProcess, Agents, agents_ended, until, write_config
from tests.doctor.running import Findings, checked, doctor, severities
from tests.engines import engine, failure_of, make_spec, pair, works
from tests.faulty_link import HAVE_LINKS, THERE, FaultyLink, faulty_link
from tests.keyring import OBSERVER, KeyRing
from tests.namespaces import HAVE_NAMESPACES, hosts, run_ip

pytestmark = pytest.mark.anyio

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]


async def look_at(*arguments: str) -> Findings:
    """The findings without the family's name; the doctor has event loops of its own."""
    found = await anyio.to_thread.run_sync(partial(doctor, "--only", "peer", *arguments))
    return {name.removeprefix("peer."): one for name, one in found.items()}


async def look_at_pair(prefill: AgentProcess, decode: AgentProcess) -> Findings:
    return await look_at("--peer", prefill.peer, "--from", decode.peer)


async def test_a_pair_that_is_warm_is_ok_and_looked_at_from_both_sides(fresh: Agents) -> None:
    # Its tickets name another host than the list does.
    prefill = fresh.prepare("prefill", shake_hands_ahead="anybody", advertise_host="localhost")
    decode = fresh.prepare("decode", peers=[prefill.settings["peer_bind"]], mapped=True)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach):
        await until(lambda: decode.metric("warm_peers") == 1)

        alone = await look_at("--peer", prefill.peer)
        found = await look_at_pair(prefill, decode)

    of_one = ("socket", "packets", "data", "clock", "one_machine")
    of_both = ("from", "roles", "protocol", "keys", "handshake")
    assert severities(alone) == dict.fromkeys(of_one, "ok")
    assert severities(found) == dict.fromkeys(of_one + of_both, "ok")
    assert found["handshake"]["found"] == "listed and warm, routes known: 1"
    assert found["one_machine"]["found"].endswith("its memory can be mapped")


async def test_a_handshake_that_was_refused_is_told_until_one_is_done(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        engine(DecodeSession, decode.attach, make_spec(model="another"), seed=3) as other,
    ):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        fetch = other.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        failure = await failure_of(fetch)

        refused = await look_at_pair(prefill, decode)
        assert await works(source, target)
        done = await look_at_pair(prefill, decode)
        await offer.withdraw()

    # The path is that of the decode agent, and not of this shell.
    assert "closed by the decode agent's config" in refused["one_machine"]["found"]
    assert refused["handshake"]["severity"] == "error"
    assert failure.message in refused["handshake"]["found"]
    assert severities(done)["handshake"] == "ok"
    assert "its NIXL takes connections at" in done["data"]["found"]


async def test_each_agent_is_asked_with_its_own_key_and_known_though_it_was_never_met(
    fresh: Agents,
) -> None:
    ring = KeyRing(fresh.folder)
    prefill = ring.prepare(fresh, Role.PREFILL, "p", advertise_host="localhost")
    at, strange = prefill.settings["peer_bind"], ring.pair("stranger").public
    decode = ring.prepare(fresh, Role.DECODE, "d", peers=[f"{at} {strange}"])
    fresh.start(prefill, decode)
    decode.says("peer.cold")
    keys = [
        f"--{of}server-key={ring.pair(name).public}" for of, name in (("", "p"), ("from-", "d"))
    ]

    found = await look_at(
        *("--peer", at, "--from", decode.peer, "--key-file", str(ring.secret_path(OBSERVER))), *keys
    )

    assert (severities(found)["from"], severities(found)["keys"]) == ("ok", "ok")
    assert found["handshake"]["severity"] == "error"
    assert f"its key {strange} is not trusted" in found["handshake"]["found"]


@pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")
def test_an_interface_that_is_down_is_named_by_doctor_and_by_an_agent_and_the_peer_is_not_blamed(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    any_port = "tcp://127.0.0.1:0"
    told = {"agent_id": "one", "peer_bind": any_port, "events_bind": any_port}
    write_config(config, {**told, "data_interfaces": ["kv9"], "runtime_dir": str(tmp_path)})
    options = ["--only", "agents", "--only", "peer", "--json", "--config", str(config)]
    with hosts("alone") as made:
        host = made["alone"]
        host.add_interface("kv9", "10.99.0.1")
        run_ip("-n", host.name, "link", "set", "kv9", "down")

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            wanted = [*host.command, sys.executable, *command]
            return subprocess.run(wanted, capture_output=True, text=True, check=False, timeout=60)

        done = run(*KVBUS[1:], "doctor", *options, "--peer", "tcp://10.99.0.2:7701")
        agent = run("-m", "kvbus_decode", str(config))

    found = checked(json.loads(done.stdout), status=done.returncode)
    interfaces, socket = found["agents.one.interfaces"], found["peer.socket"]
    assert (interfaces["severity"], socket["severity"]) == ("error", "error")
    assert interfaces["found"].endswith("without a link now: kv9")
    assert "Network is unreachable" in socket["found"]
    assert "data_interfaces is down here" in socket["fix"]
    assert agent.returncode == 1
    assert "UCX does not start on data_interfaces = ['kv9']" in agent.stderr
    assert "no link: kv9" in agent.stderr


@pytest.fixture
def far() -> Iterator[tuple[FaultyLink, AgentProcess]]:
    """A network, and an agent at its other end."""
    with faulty_link() as link, agents_ended(Agents) as agents:
        agent: AgentProcess = agents.prepare(
            "prefill",
            peer_bind=f"tcp://{THERE}:7701",
            events_bind=f"tcp://{THERE}:7702",
            data_interfaces=[link.interface],
            insecure=True,
        )
        agent.runner = link.host.command
        agents.start(agent)
        yield link, agent
        agents.end()  # before its network does


@pytest.mark.long
@pytest.mark.skipif(not HAVE_LINKS, reason="needs root, iproute2 and /dev/net/tun")
def test_the_way_on_which_a_real_network_loses_large_packets_is_named(
    far: tuple[FaultyLink, AgentProcess],
) -> None:
    link, agent = far
    intact = link.largest_bytes_there, link.largest_bytes_back

    found = [doctor("--only", "peer", "--peer", agent.peer)["peer.packets"]]
    for largest in ((1300, intact[1]), (intact[0], 1300), (intact[0], 300)):
        link.largest_bytes_there, link.largest_bytes_back = largest
        found.append(doctor("--only", "peer", "--peer", agent.peer)["peer.packets"])

    assert [one["severity"] for one in found] == ["ok", "error", "error", "error"]
    lost = ("there, and back", "lost on the way there", "lost on the way back", "for its status")
    assert all(text in one["found"] for text, one in zip(lost, found, strict=True))
