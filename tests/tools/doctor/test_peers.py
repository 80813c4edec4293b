"""``kvbus doctor --peer --from``: findings about two agents, by what they report of themselves.

The agents are played: they report what a row of a table has.
"""

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
ROUTER = f"trusts the key {KEYS['d']} of the decode agent 'decode-0' as router"
Status = dict[str, Any]


def of(role: str, view: Status | None = None, **changes: Any) -> Status:
    return told_by(role, view=view or {}, **changes)


def look_at(prefill: Status, decode: Status, *, ahead_s: float = 0.0) -> Findings:
    """The findings about two agents with these statuses, without the family's name."""
    with agent(prefill, clock_ahead_s=ahead_s) as peer, agent(decode) as reader:
        found = doctor("--only", "peer", "--peer", peer, "--from", reader)
    return {name.removeprefix("peer."): one for name, one in found.items()}


def handshake(**view: Any) -> tuple[Status, Status]:
    return of("prefill"), of("decode", view)


def keys(of_prefill: Status, of_decode: str) -> tuple[Status, Status]:
    trusting = {"server_key": of_decode, "roles": ["prefill"]} if of_decode else {}
    return of("prefill", of_prefill), of("decode", trusting)


def places(theirs: Status, ours: Status) -> tuple[Status, Status]:
    lends = {**HERE, "path": "/nowhere/memory.sock", "pid_namespace": "pid:[2]", **theirs}
    return of("prefill", engines={"e": True}, sharing=lends), of("decode", sharing={**HERE, **ours})


P_KEY, TRUSTS_DECODE = {"server_key": KEYS["p"]}, {"server_key": KEYS["p"], "roles": ["decode"]}
OTHER_MOUNTS = {"mount_namespace": "mnt:[8]"}
MAPPED = {"engines": {"e at prefill-0": "open"}}
NO_ROOM = {"engines": {"e at prefill-0": "no room"}}
ROWS: list[tuple[tuple[Status, Status], str, str, str]] = [
    (handshake(num_routes=2, listed=True, connected=True), "handshake", "ok", "routes known: 2"),
    (handshake(problem="no key"), "handshake", "error", "failed: no key"),
    (handshake(problem="no key", num_routes=1), "handshake", "warning", "failed: no key"),
    (handshake(listed=True), "handshake", "note", "listed, not connected"),
    (handshake(), "handshake", "note", "not listed; no engine"),
    (keys({}, ""), "keys", "ok", "without keys"),
    (keys(P_KEY, ""), "keys", "error", "'prefill-0' has a key, the decode agent"),
    (keys(TRUSTS_DECODE, KEYS["d"]), "keys", "ok", "trusts the key of"),
    (keys({**P_KEY, "roles": ["router"]}, KEYS["d"]), "keys", "error", ROUTER),
    (keys(P_KEY, KEYS["d"]), "keys", "error", "as nothing, not as decode"),
    (places({}, {}), "one_machine", "warning", "TCP: /nowhere/memory.sock is not here"),
    (places({"uid": 8}, {}), "one_machine", "warning", "it is of uid 8, and the reader of uid 7"),
    (places({"closed": "mapped = false"}, {}), "one_machine", "warning", "TCP: mapped = false"),
    (places({"pid_namespace": PIDS}, {}), "one_machine", "ok", "through shared memory: /nowhere"),
    (places({}, MAPPED), "one_machine", "ok", "can be mapped"),
    (places({}, NO_ROOM), "one_machine", "warning", "over TCP: no room"),
    (places(OTHER_MOUNTS, OTHER_MOUNTS), "one_machine", "ok", "can be mapped"),
    (places({}, OTHER_MOUNTS), "one_machine", "warning", "may not be there for the reader"),
    (places({"machine": "another"}, {}), "one_machine", "ok", "on two machines"),
    ((of("prefill"), of("decode", sharing=HERE)), "one_machine", "note", ""),
    ((of("prefill"), of("decode", sharing=HERE)), "from", "ok", ""),
    ((of("prefill"), of("decode", sharing={**HERE, "machine": "other"})), "from", "note", ""),
    ((of("decode"), of("prefill")), "roles", "error", "--from the prefill agent"),
]


@pytest.mark.parametrize(
    ("statuses", "name", "severity", "text"),
    ROWS,
    ids=[f"{name}-{severity}-{n}" for n, (_, name, severity, _) in enumerate(ROWS)],
)
def test_each_finding_follows_from_both_statuses(
    statuses: tuple[Status, Status], name: str, severity: str, text: str
) -> None:
    found = look_at(*statuses)
    one = found[name]

    assert one["severity"] == severity
    assert text in one["found"]
    if name == "keys":
        needs_trust = " trusts the key d" in one["found"]
        assert ("kvbus keys trust FILE" in one["command"]) == needs_trust
    if name == "from":
        assert ("run this on that machine" in one["why"]) == (severity == "note")
    if name == "roles":
        assert not found.keys() & {"keys", "handshake"}


def test_faults_that_agents_report_are_shown_with_what_to_do() -> None:
    silent, lost = [{"what": what, "do": "See."} for what in ("it is silent", "lines are lost")]

    found = look_at(of("prefill"), of("decode", faults=[silent, lost], sharing=HERE))

    hidden = "the agent reports faults only to a trusted key, or to its own user"
    assert found["faults"]["found"] == hidden
    assert found["reader_faults"]["severity"] == "warning"
    assert found["reader_faults"]["found"] == "it is silent; lines are lost"
    assert found["reader_faults"]["fix"] == "See."


@pytest.mark.parametrize(("ahead_s", "severity"), [(0.0, "ok"), (-5.0, "warning")])
def test_its_clock_is_compared_with_that_of_this_machine(ahead_s: float, severity: str) -> None:
    clock = look_at(of("prefill"), of("decode"), ahead_s=ahead_s)["clock"]

    assert clock["severity"] == severity
    assert clock["values"]["ahead_s"] == pytest.approx(ahead_s, abs=0.5)


def test_closed_ports_and_unknown_hosts_are_named() -> None:
    port = free_port()

    closed = doctor("--only", "peer", "--peer", f"tcp://127.0.0.1:{port}")
    nowhere = doctor("--only", "peer", "--peer", "tcp://nowhere.invalid:7701")
    with agent(of("prefill")) as peer:
        found = doctor("--only", "peer", "--peer", peer, "--from", "tcp://127.0.0.1:1")

    assert list(closed) == list(nowhere) == ["peer.socket"]
    assert f"127.0.0.1:{port}: Connection refused" in closed["peer.socket"]["found"]
    assert "'nowhere.invalid'" in nowhere["peer.socket"]["found"]
    assert found["peer.from"]["severity"] == "error"
    assert "Connection refused" in found["peer.from"]["found"]
    assert "peer.roles" not in found


def test_a_path_that_loses_large_packets_is_an_error() -> None:
    with agent(of("prefill"), is_lost=lambda _, body: bool(body.get("echo"))) as peer:
        found = doctor("--only", "peer", "--peer", peer)["peer.packets"]

    assert found["severity"] == "error"
    assert "large packets are lost" in found["found"]
