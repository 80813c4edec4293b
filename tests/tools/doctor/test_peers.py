"""``kvbus doctor --peer --from``: what it says of two agents, by what they say of themselves.

The agents are played: they tell what a row of a table has.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbus.spawn import free_port
from tests.tools.doctor.played_agents import agent, told_by
from tests.tools.doctor.running import Findings, doctor

MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
MOUNTS, PIDS = (str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("mnt", "pid"))
HERE = {"machine": MACHINE, "uid": 7, "mount_namespace": MOUNTS, "pid_namespace": PIDS}
KEYS = {"p": "p" * 40, "d": "d" * 40}
Told = dict[str, Any]


def look_at(prefill: Told, decode: Told, *, ahead_s: float = 0.0) -> Findings:
    """The findings about a pair of agents that tell this, without the family's name."""
    with agent(prefill, clock_ahead_s=ahead_s) as peer, agent(decode) as reader:
        found = doctor("--only", "peer", "--peer", peer, "--from", reader)
    return {name.removeprefix("peer."): one for name, one in found.items()}


def of(role: str, view: Told | None = None, **changes: Any) -> Told:
    return told_by(role, view=view or {}, **changes)


prefill, decode = partial(of, "prefill"), partial(of, "decode")


@pytest.mark.parametrize(
    ("view", "severity", "said"),
    [
        ({"num_routes": 2, "listed": True, "connected": True}, "ok", "connected, routes known: 2"),
        ({"problem": "no key"}, "error", "failed: no key"),
        ({"problem": "no key", "num_routes": 1}, "warning", "failed: no key"),
        ({"listed": True}, "note", "listed, not connected"),
        ({}, "note", "not listed; no engine"),
    ],
)
def test_what_came_of_handshakes(view: Told, severity: str, said: str) -> None:
    found = look_at(prefill(), decode(view))

    assert found["handshake"]["severity"] == severity
    assert said in found["handshake"]["found"]


def test_what_each_says_is_wrong_with_it_is_told_with_what_to_do() -> None:
    silent, lost = [{"what": what, "do": "See."} for what in ("it is silent", "lines are lost")]

    found = look_at(prefill(), decode(faults=[silent, lost], **sharing()))

    assert (
        found["faults"]["found"] == "what is wrong is told with a key, or to the user of the agent"
    )
    assert found["reader_faults"]["severity"] == "warning"
    assert found["reader_faults"]["found"] == "it is silent; lines are lost"
    assert found["reader_faults"]["fix"] == "See."


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "severity", "said"),
    [
        ({}, {}, "ok", "without keys"),
        ({"server_key": KEYS["p"]}, {}, "error", "'prefill-0' has a key, the decode agent"),
        ({"server_key": KEYS["p"], "roles": ["decode"]}, KEYS["d"], "ok", "trusts the key of"),
        (
            {"server_key": KEYS["p"], "roles": ["router"]},
            KEYS["d"],
            "error",
            f"trusts the key {KEYS['d']} of the decode agent 'decode-0' as router",
        ),
        ({"server_key": KEYS["p"]}, KEYS["d"], "error", "as nothing, not as decode"),
    ],
)
def test_each_agent_must_trust_key_of_other_in_its_role(
    of_prefill: Told, of_decode: Any, severity: str, said: str
) -> None:
    trusting = {"server_key": of_decode, "roles": ["prefill"]} if of_decode else {}

    keys = look_at(prefill(of_prefill), decode(trusting))["keys"]

    assert keys["severity"] == severity
    assert said in keys["found"]
    assert ("kvbus keys trust FILE" in keys["command"]) == (" trusts the key d" in keys["found"])


def sharing(**changes: Any) -> Told:
    return {"sharing": {**HERE, **changes}}


LENDS = {"path": "/nowhere/memory.sock", "pid_namespace": "pid:[2]"}
OTHER_MOUNTS = {"mount_namespace": "mnt:[8]"}


@pytest.mark.parametrize(
    ("theirs", "ours", "severity", "said"),
    [
        ({}, {}, "warning", "over TCP: /nowhere/memory.sock is not here"),
        ({"uid": 8}, {}, "warning", "over TCP: it is of uid 8, and the reader of uid 7"),
        ({"closed": "mapped = false"}, {}, "warning", "over TCP: mapped = false"),
        ({"pid_namespace": PIDS}, {}, "ok", "through shared memory: /nowhere"),
        ({}, {"engines": {"e at prefill-0": "open"}}, "ok", "can be mapped"),
        ({}, {"engines": {"e at prefill-0": "no room"}}, "warning", "over TCP: no room"),
        (OTHER_MOUNTS, OTHER_MOUNTS, "ok", "can be mapped"),
        ({}, OTHER_MOUNTS, "warning", "may not be there for the reader"),
        ({"machine": "another"}, {}, "ok", "on two machines"),
    ],
)
def test_how_kv_comes_is_told_by_what_both_say_of_their_places(
    theirs: Told, ours: Told, severity: str, said: str
) -> None:
    lends = prefill(engines={"e": True}, **sharing(**{**LENDS, **theirs}))

    found = look_at(lends, decode(**sharing(**ours)))

    assert found["one_machine"]["severity"] == severity
    assert said in found["one_machine"]["found"]


@pytest.mark.parametrize(("ahead_s", "severity"), [(0.0, "ok"), (-5.0, "warning")])
def test_its_clock_is_compared_with_that_of_this_machine(ahead_s: float, severity: str) -> None:
    clock = look_at(prefill(), decode(), ahead_s=ahead_s)["clock"]

    assert clock["severity"] == severity
    assert clock["values"]["ahead_s"] == pytest.approx(ahead_s, abs=0.5)


def test_wrong_roles_end_the_comparison() -> None:
    found = look_at(decode(), prefill())

    assert found["roles"]["severity"] == "error"
    assert "--from the prefill agent" in found["roles"]["found"]
    assert not found.keys() & {"keys", "handshake"}


@pytest.mark.parametrize(("machine", "severity"), [(MACHINE, "ok"), ("another", "note")])
def test_the_ways_are_those_of_the_machine_that_looks(machine: str, severity: str) -> None:
    found = look_at(prefill(), decode(**sharing(machine=machine)))

    assert found["from"]["severity"] == severity
    assert ("run this on that machine" in found["from"]["why"]) == (machine == "another")


def test_where_agents_run_is_not_told_to_strangers_and_noted() -> None:
    assert look_at(prefill(), decode(**sharing()))["one_machine"]["severity"] == "note"


def test_an_agent_of_this_side_that_does_not_answer_is_an_error() -> None:
    with agent(prefill()) as peer:
        found = doctor("--only", "peer", "--peer", peer, "--from", "tcp://127.0.0.1:1")

    assert found["peer.from"]["severity"] == "error"
    assert "Connection refused" in found["peer.from"]["found"]
    assert "peer.roles" not in found


def test_closed_port_and_unknown_host_are_named() -> None:
    port = free_port()

    closed = doctor("--only", "peer", "--peer", f"tcp://127.0.0.1:{port}")
    nowhere = doctor("--only", "peer", "--peer", "tcp://nowhere.invalid:7701")

    assert list(closed) == list(nowhere) == ["peer.socket"]
    assert f"127.0.0.1:{port}: Connection refused" in closed["peer.socket"]["found"]
    assert "'nowhere.invalid'" in nowhere["peer.socket"]["found"]


def test_a_way_that_loses_large_packets_is_thought_of() -> None:
    with agent(prefill(), is_lost=lambda _, body: bool(body.get("echo"))) as peer:
        found = doctor("--only", "peer", "--peer", peer)["peer.packets"]

    assert found["severity"] == "error"
    assert "large packets are lost" in found["found"]
