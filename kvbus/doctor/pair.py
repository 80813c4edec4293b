"""Compares the agents of two sides as they will work together, by what each says of the other.

Refuses to have one agent try the other: what they have done already is what is known.
"""

from collections.abc import Iterator
from shlex import quote
from typing import NamedTuple

from kvbus.agent.identity import machine_id
from kvbus.doctor.asking import (
    LOOK_THERE,
    PeerToCheck,
    answer_or_error,
    finding,
    fix_here,
    status_or_error,
)
from kvbus.doctor.clock import clock_between
from kvbus.doctor.finding import ERROR, NOTE, WARNING, Finding, Severity
from kvbus.doctor.near import near_findings
from kvbus.doctor.sharing import engines_met
from kvbus.errors import KVBusError
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.status import AgentStatus, PeerView, Status

LOOK_AT_READER = f"See that its machine and port are reached from here. {LOOK_THERE}"
ELSEWHERE = "Sockets, packets and ports were looked at from here: run this on that machine."
ROLES = "KV goes from a prefill agent to a decode agent."
ROLES_FIX = (
    "Name the prefill agent with --peer, and the decode agent that reads from it with --from."
)
PROTOCOL_FIX = "Upgrade the older one."
KEYS = "Agents with keys speak only with keys that they trust, in the role of the other agent."
KEYS_FIX = "Trust it, in the file (authorized_keys) of the agent that does not."
SILENT = "Fetches from it are refused with peer_unreachable until it answers."
SILENT_FIX = (
    "See that the prefill agent is not stopped, and that the decode agent's machine reaches it: "
    "run this there."
)
REFUSED = "Fetches from it fail, or take longer, until hands are shaken."
REFUSED_FIX = (
    "Do what the reason says; handshake.refused and peer.cold in the decode agent's log have more."
)


class Side(NamedTuple):
    """One of the two: where it is, what it holds, and what it says of the other one.

    ``view`` is None of an agent of an earlier version.
    """

    at: PeerToCheck
    status: AgentStatus
    view: PeerView | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"the {self.status.role} agent '{self.status.agent_id}'"

    @property
    def endpoints(self) -> tuple[str, str]:
        """As its tickets have it, and as it was asked."""
        return self.status.peer_endpoint or self.at.endpoint, self.at.endpoint

    @property
    def key(self) -> str:
        """Its public key; empty where it has none, or does not tell."""
        return self.view.server_key if self.view else ""


def check_pair(peer: Side, at: PeerToCheck) -> Iterator[Finding]:
    """Roles, versions, keys, what came of handshakes, how KV comes, and the two clocks."""
    status = status_or_error(at)
    if isinstance(status, KVBusError):
        fix, command = fix_here(status.message)
        why = "The two are not compared."
        yield finding(at, "from", status.message, why, fix or LOOK_AT_READER, command=command)
        return
    reader = Side(at, status)
    yield reader_finding(reader)
    yield (roles := roles_finding(peer, reader))
    if roles.is_complaint:
        return
    peer = _seen(peer, reader)
    reader = _seen(reader, peer)
    peer = _seen(peer, reader)  # once more: by now the reader's key is known
    yield protocol_finding(peer, reader)
    yield keys_finding(peer, reader)
    yield handshake_finding(peer, reader)
    yield from path_findings(peer, reader)
    yield clock_between(peer.at, reader.at)


def reader_finding(reader: Side) -> Finding:
    """It answers; the ways that were looked at are its own if it is here."""
    told, its = f"{reader.name} answers", reader.status.sharing
    if its is None or its.machine == machine_id():
        return finding(reader.at, "from", found=told)
    elsewhere = f"{told}, from another machine than this"
    return Finding("peer.from", NOTE, elsewhere, {"endpoint": reader.at.endpoint}, why=ELSEWHERE)


def roles_finding(peer: Side, reader: Side) -> Finding:
    """One reads from the other, and not the other way round."""
    roles = peer.status.role, reader.status.role
    told = f"--peer is {peer.name}, --from {reader.name}"
    if roles == (AgentRole.PREFILL, AgentRole.DECODE):
        return finding(peer.at, "roles", found=told)
    return finding(peer.at, "roles", told, ROLES, ROLES_FIX)


def protocol_finding(peer: Side, reader: Side) -> Finding:
    """There is a version that both speak."""
    theirs, ours = peer.view, reader.view
    if theirs is None or ours is None:
        return _untold(peer, reader, "protocol")
    told = (
        f"{peer.name} speaks versions {theirs.min_protocol} to {theirs.max_protocol} of the "
        f"protocol, {reader.name} {ours.min_protocol} to {ours.max_protocol}"
    )
    if max(theirs.min_protocol, ours.min_protocol) <= min(theirs.max_protocol, ours.max_protocol):
        return finding(peer.at, "protocol", found=told)
    why = "Their handshake is refused with unsupported_version."
    return finding(peer.at, "protocol", told, why, PROTOCOL_FIX)


def keys_finding(peer: Side, reader: Side) -> Finding:
    """Both have keys, and trust that of the other in its role; or none has."""
    if peer.view is None or reader.view is None:
        return _untold(peer, reader, "keys")
    if not (peer.key or reader.key):
        return finding(peer.at, "keys", found="both agents are without keys")
    if not (peer.key and reader.key):
        has, lacks = (peer, reader) if peer.key else (reader, peer)
        problem = f"{has.name} has a key, {lacks.name} has none"
        fix = "Give both key_file and authorized_keys (docs/security.md), or neither."
        return finding(peer.at, "keys", problem, KEYS, fix)
    distrusts = [*_distrusts(reader, peer), *_distrusts(peer, reader)]
    if not distrusts:
        return finding(peer.at, "keys", found="each agent trusts the key of the other")
    problem, command = ("; ".join(one) for one in zip(*distrusts, strict=True))
    return finding(peer.at, "keys", problem, KEYS, KEYS_FIX, command=command)


def _distrusts(side: Side, other: Side) -> Iterator[tuple[str, str]]:
    """What is wrong with the trust of the one in the other, and the command that mends it."""
    roles, role = side.view.roles if side.view else (), other.status.role
    if role not in roles:
        trusted = " and ".join(roles) or "nothing"
        yield (
            f"{side.name} trusts the key {other.key} of {other.name} as {trusted}, not as {role}",
            f"kvbus keys trust FOLDER {quote(other.key)} --name {quote(other.status.agent_id)} "
            f"--role {role}",
        )


def handshake_finding(peer: Side, reader: Side) -> Finding:
    """What the decode agent has met with."""
    known = (reader.status.silent_peers.get(one) for one in peer.endpoints)
    silent_s = next((one for one in known if one is not None), None)
    if silent_s is not None:
        problem = f"{reader.name} counts it as silent: it has not answered for {silent_s:.0f} s"
        return finding(peer.at, "handshake", problem, SILENT, SILENT_FIX)
    view = reader.view
    if view is None:
        return _untold(peer, reader, "handshake")
    if view.problem:
        severity = WARNING if view.num_routes else ERROR
        return _handshake(
            peer, severity, f"the last try of {reader.name} to meet it failed: {view.problem}"
        )
    if view.num_routes:
        listed = "listed and warm, " if view.warm else ""
        return finding(peer.at, "handshake", found=f"{listed}routes known: {view.num_routes}")
    if view.listed:
        return _handshake(peer, NOTE, "listed, not warm: no two engines that fit are there yet")
    return _handshake(peer, NOTE, f"not listed; no engine of {reader.name} has a route to it now")


def path_findings(peer: Side, reader: Side) -> Iterator[Finding]:
    """How KV comes: mapped, through shared memory, or over the network."""
    theirs, ours = peer.status.sharing, reader.status.sharing
    if theirs is None or ours is None:
        yield _untold(peer, reader, "one_machine")
        return
    near = list(
        near_findings(peer.at.endpoint, theirs, ours, met=engines_met(peer.status, reader.status))
    )
    yield from near or [
        finding(peer.at, "one_machine", found="the agents are on two machines: NIXL reads KV")
    ]


def _seen(one: Side, other: Side) -> Side:
    """With what it says of the other, by whichever of its addresses that is known there."""
    questions = (Status(peer=at, key=other.key) for at in dict.fromkeys(other.endpoints))
    answers = [answer_or_error(one.at, question) for question in questions]
    told = [one for one in answers if not isinstance(one, KVBusError)]
    best = max(told, key=_knows, default=one.status)
    return Side(one.at, best, best.view)


def _knows(status: AgentStatus) -> bool:
    view = status.view
    return view is not None and bool(view.listed or view.num_routes or view.problem)


def _handshake(peer: Side, severity: Severity, found: str) -> Finding:
    complaint = severity is not NOTE
    return Finding(
        "peer.handshake",
        severity,
        found,
        {"endpoint": peer.at.endpoint, "error": found if complaint else ""},
        why=REFUSED if complaint else "",
        fix=REFUSED_FIX if complaint else "",
    )


def _untold(peer: Side, reader: Side, subject: str) -> Finding:
    older = " and ".join(one.name for one in (peer, reader) if one.view is None)
    return Finding(
        f"peer.{subject}",
        NOTE,
        f"not looked at: {older or 'an agent'} does not tell",
        {"endpoint": peer.at.endpoint, "error": ""},
        why="It is of an earlier version, or has gone meanwhile; where an agent runs is told only "
        "with a key, or to its own user.",
    )
