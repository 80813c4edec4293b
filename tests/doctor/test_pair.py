"""``kvbus doctor --peer --from``: what it says of a prefill and a decode agent as a pair."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.agent.process.machine import machine_id
from kvbus.bus import ClientCurve
from kvbus.cli import app
from kvbus.doctor.asking import PeerToCheck
from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.doctor.pair import (
    Side,
    handshake_finding,
    path_findings,
    protocol_finding,
    reader_finding,
)
from kvbus.doctor.peer import check_peer
from kvbus.engine import DecodeSession
from kvbus.keys import Role
from kvbus.protocol import AgentRole, AgentStatus, PeerView, Sharing
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.doctor.earlier_agent import earlier_agent
from tests.engines import engine, failure_of, make_spec, pair, works
from tests.keyring import OBSERVER, KeyRing

pytestmark = pytest.mark.anyio

Found = dict[str, Finding]
PEER, READER = "tcp://10.0.0.1:7701", "tcp://10.0.0.2:7701"
APART_S = 5.0
OTHER_CLOCK = f"import time\nreal = time.time\ntime.time = lambda: real() + {APART_S}\n"


@pytest.fixture
def agents() -> Iterator[Agents]:
    """Agents of one test."""
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


async def look_at(*asked: PeerToCheck) -> Found:
    """The findings by name; the doctor has event loops of its own."""
    findings = await anyio.to_thread.run_sync(lambda: list(check_peer(*asked)))
    return {one.name.removeprefix("peer."): one for one in findings}


async def look_at_pair(prefill: AgentProcess, decode: AgentProcess) -> Found:
    return await look_at(PeerToCheck(prefill.peer), PeerToCheck(decode.peer))


async def test_a_pair_that_is_warm_is_ok_and_looked_at_from_both_sides(agents) -> None:
    named = {"advertise_host": "localhost"}  # as its tickets say, and the list does not
    prefill = agents.prepare("prefill", shake_hands_ahead="anybody", **named)
    decode = agents.prepare("decode", peers=[prefill.settings["peer_bind"]], mapped=True)
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach):
        await until(lambda: decode.metric("warm_peers") == 1)

        found = await look_at_pair(prefill, decode)

    assert {name: one.severity for name, one in found.items()} == dict.fromkeys(
        (
            *("socket", "packets", "data", "from", "roles", "protocol", "keys", "handshake"),
            *("one_machine", "clock"),
        ),
        OK,
    )
    assert found["handshake"].found == "listed and warm, routes known: 1"
    assert found["one_machine"].found == "it is on the same machine, and its memory can be mapped"
    assert found["keys"].found == "both agents are without keys"


async def test_the_path_is_that_of_the_decode_agent_and_not_of_this_shell(agents) -> None:
    prefill, decode = agents.prepare("prefill"), agents.prepare("decode", mapped=False)
    agents.start(prefill, decode)

    alone, found = await look_at(PeerToCheck(prefill.peer)), await look_at_pair(prefill, decode)

    assert "can be mapped" in alone["one_machine"].found
    assert "shared memory: closed by the decode agent's config" in found["one_machine"].found
    assert found["handshake"].severity is NOTE
    assert "not listed" in found["handshake"].found


async def test_a_handshake_that_was_refused_is_told_until_one_is_done(agents) -> None:
    prefill, decode = agents.prepare("prefill"), agents.prepare("decode")
    agents.start(prefill, decode)
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

    assert refused["handshake"].severity is ERROR
    assert failure.message in refused["handshake"].found
    assert (done["handshake"].severity, done["handshake"].found) == (OK, "routes known: 1")


async def test_a_peer_that_is_listed_and_cannot_be_met_is_told_with_its_reason(agents) -> None:
    prefill = agents.prepare("prefill", shake_hands_ahead="nobody")
    decode = agents.prepare("decode", peers=[prefill.settings["peer_bind"]])
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach):
        (line,) = decode.says("peer.cold")

        found = await look_at_pair(prefill, decode)

    assert found["handshake"].severity is ERROR
    assert line["reason"] in found["handshake"].found


async def test_an_agent_that_is_listed_by_another_address_and_was_never_met_is_known(
    agents,
) -> None:
    ring = KeyRing(agents.folder)
    prefill = ring.prepare(agents, Role.PREFILL, "p", advertise_host="localhost")
    at, strange = prefill.settings["peer_bind"], ring.pair("stranger").public
    decode = ring.prepare(agents, Role.DECODE, "d", peers=[f"{at} {strange}"])
    agents.start(prefill, decode)
    curves = [ClientCurve(ring.pair(OBSERVER), ring.pair(name).public) for name in ("p", "d")]
    decode.says("peer.cold")

    found = await look_at(PeerToCheck(at, curves[0]), PeerToCheck(decode.peer, curves[1]))

    assert found["handshake"].severity is ERROR
    assert f"its key {strange} is not trusted" in found["handshake"].found


async def test_wrong_roles_end_the_comparison(agents) -> None:
    prefill, decode = agents.prepare("prefill"), agents.prepare("decode")
    agents.start(prefill, decode)

    found = await look_at_pair(decode, prefill)

    assert list(found)[-1] == "roles"
    assert found["roles"].severity is ERROR
    assert "--from the prefill agent" in found["roles"].found


async def test_the_clocks_of_the_two_are_compared(agents, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCK)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    prefill = agents.prepare("prefill")
    decode = agents.prepare("decode", env={"PYTHONPATH": path})
    agents.start(prefill, decode)

    of_decode = (await look_at(PeerToCheck(decode.peer)))["clock"]
    of_prefill = (await look_at(PeerToCheck(prefill.peer)))["clock"]
    of_both = (await look_at_pair(prefill, decode))["clock"]

    assert (of_prefill.severity, of_decode.severity, of_both.severity) == (OK, WARNING, WARNING)
    assert "ahead of this machine's" in of_decode.found
    assert "behind that of --from" in of_both.found
    assert of_decode.values["ahead_s"] == pytest.approx(APART_S, abs=1.0)
    assert of_both.values["ahead_s"] == pytest.approx(-APART_S, abs=1.0)
    assert "signed tickets" in of_both.why


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"p": Role.PREFILL, "d": Role.DECODE}, "each agent trusts the key of the other"),
        ({"p": Role.PREFILL, "d": Role.ROUTER}, "the key {d} of the decode agent 'decode-1' as ro"),
        ({"p": Role.OBSERVER, "d": Role.DECODE}, "the key {p} of the prefill agent 'prefill-0' as"),
        ({"p": Role.DECODE, "d": Role.PREFILL}, "not as prefill; the prefill agent 'prefill-0' tr"),
    ],
)
async def test_each_agent_has_to_trust_the_key_of_the_other_in_its_role(
    agents, roles: dict[str, Role], said: str
) -> None:
    ring = KeyRing(agents.folder)
    for name, role in roles.items():
        ring.settings(name)
        ring.trust(name, role)
    prefill = ring.prepare(agents, Role.PREFILL, "p")
    decode = ring.prepare(agents, Role.DECODE, "d")
    agents.start(prefill, decode)
    asked = (
        PeerToCheck(one.peer, ClientCurve(ring.pair(OBSERVER), ring.pair(name).public))
        for one, name in ((prefill, "p"), (decode, "d"))
    )

    keys = (await look_at(*asked))["keys"]

    assert said.format(**{name: ring.pair(name).public for name in roles}) in keys.found
    assert (keys.severity is OK) == (said.startswith("each"))
    assert keys.severity is OK or "kvbus keys trust FOLDER" in keys.command


async def test_the_command_asks_each_agent_with_its_own_key(agents) -> None:
    ring = KeyRing(agents.folder)
    prefill, decode = (ring.prepare(agents, role, role) for role in (Role.PREFILL, Role.DECODE))
    agents.start(prefill, decode)
    public = [ring.pair(role).public for role in (Role.PREFILL, Role.DECODE)]
    command = ["doctor", "--only", "peer", "--json", "--peer", prefill.peer, "--from", decode.peer]
    command += ["--key-file", str(ring.secret_path(OBSERVER)), f"--server-key={public[0]}"]

    done = await anyio.to_thread.run_sync(
        CliRunner().invoke, app, [*command, f"--from-server-key={public[1]}"]
    )

    found = {one["name"]: one["severity"] for one in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 0
    assert (found["peer.from"], found["peer.keys"]) == ("ok", "ok")


async def test_an_agent_with_keys_and_one_without_are_no_pair(agents) -> None:
    ring = KeyRing(agents.folder)
    prefill, decode = ring.prepare(agents, Role.PREFILL, "p"), agents.prepare("decode")
    agents.start(prefill, decode)
    curve = ClientCurve(ring.pair(OBSERVER), ring.pair("p").public)

    found = await look_at(PeerToCheck(prefill.peer, curve), PeerToCheck(decode.peer))

    assert found["keys"].severity is ERROR
    assert "'prefill-0' has a key, the decode agent 'decode-1' has none" in found["keys"].found


async def test_what_an_agent_of_an_earlier_version_does_not_tell_is_noted(agents) -> None:
    decode = agents.prepare("decode")
    agents.start(decode)

    with earlier_agent("prefill") as endpoint:
        found = await look_at(PeerToCheck(endpoint), PeerToCheck(decode.peer))

    noted = {name for name, one in found.items() if one.severity is NOTE}
    assert {one.severity for one in found.values()} == {OK, NOTE}
    assert noted == {"packets", "protocol", "keys", "handshake", "one_machine", "clock"}
    assert "the way back was not looked at" in found["packets"].found
    assert "the prefill agent 'earlier' does not tell" in found["keys"].found


async def test_an_agent_of_this_side_that_does_not_answer_is_an_error(agents) -> None:
    prefill = agents.prepare("prefill")
    agents.start(prefill)

    found = await look_at(PeerToCheck(prefill.peer), PeerToCheck("tcp://127.0.0.1:1"))

    assert list(found)[-1] == "from"
    assert found["from"].severity is ERROR
    assert "Connection refused" in found["from"].found


def side(role: AgentRole, view: PeerView | None = None, **status: Any) -> Side:
    """An agent without engines, at the address of its role."""
    told = AgentStatus(
        agent_id=f"{role}-0", role=role, engines={}, draining=False, counts={}, **status
    )
    at = PeerToCheck(PEER if role is AgentRole.PREFILL else READER)
    return Side(at, told, view)


prefill_side, decode_side = partial(side, AgentRole.PREFILL), partial(side, AgentRole.DECODE)


@pytest.mark.parametrize(
    ("view", "silent", "severity", "said"),
    [
        (PeerView(num_routes=1), {PEER: 3.0}, ERROR, "silent: it left requests without an answer"),
        (None, {PEER: 3.0}, ERROR, "tried again in 3 s"),
        (PeerView(num_routes=1), {"tcp://10.0.0.9:1": 3.0}, OK, "routes known: 1"),
        (PeerView(problem="no"), {}, ERROR, "to meet it failed: no"),
        (PeerView(problem="no", num_routes=1), {}, WARNING, "to meet it failed: no"),
        (PeerView(listed=True), {}, NOTE, "not warm"),
        (PeerView(), {}, NOTE, "no engine of the decode agent 'decode-0' has a route to it now"),
    ],
)
def test_what_came_of_handshakes(
    view: PeerView | None, silent: dict[str, float], severity: object, said: str
) -> None:
    found = handshake_finding(prefill_side(), decode_side(view, silent_peers=silent))

    assert found.severity is severity
    assert said in found.found


@pytest.mark.parametrize(("versions", "severity"), [((1, 2), OK), ((2, 3), ERROR), ((3, 4), ERROR)])
def test_agents_have_to_speak_one_version(versions: tuple[int, int], severity: object) -> None:
    ours = PeerView(min_protocol=1, max_protocol=1)

    found = protocol_finding(prefill_side(PeerView(*versions)), decode_side(ours))

    assert found.severity is severity


@pytest.mark.parametrize(("machine", "severity"), [(machine_id(), OK), ("another", NOTE)])
def test_the_ways_are_those_of_the_machine_that_looks(machine: str, severity: object) -> None:
    found = reader_finding(decode_side(sharing=Sharing(machine=machine)))

    assert found.severity is severity
    assert ("run this on that machine" in found.why) == (machine == "another")


def test_agents_of_two_machines_use_the_network() -> None:
    prefill = prefill_side(sharing=Sharing(machine="one"))

    (found,) = path_findings(prefill, decode_side(sharing=Sharing(machine="other")))

    assert found.severity is OK
    assert "on two machines" in found.found
