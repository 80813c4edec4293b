"""Says of each pair of agents that run whether the one maps the memory of the other's engines.

Refuses to connect to a memory socket: the agents say what they share, and what came of it.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from kvbus.doctor.finding import NOTE, OK, WARNING, Finding, Severity
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.status import AgentStatus, Sharing

OPEN = "open"
WHY = (
    "Where a decode agent maps the memory of a prefill engine of its machine it copies KV in one "
    "pass, faster than NIXL does."
)


class Verdict(NamedTuple):
    """How it is between two agents."""

    severity: Severity
    found: str
    fix: str = ""


def sharing_findings(statuses: Sequence[AgentStatus]) -> Iterator[Finding]:
    """One for each prefill and each decode agent, of those that run."""
    prefills = [one for one in statuses if one.role is AgentRole.PREFILL]
    decodes = [one for one in statuses if one.role is AgentRole.DECODE]
    for prefill, decode in product(prefills, decodes):
        verdict = _verdict(prefill, decode)
        states = engines_met(prefill, decode)
        yield Finding(
            f"agents.{decode.agent_id}.maps.{prefill.agent_id}",
            verdict.severity,
            verdict.found,
            {"prefill": prefill.agent_id, "decode": decode.agent_id, "engines": states},
            why=WHY,
            fix=verdict.fix,
        )


def _verdict(prefill: AgentStatus, decode: AgentStatus) -> Verdict:
    theirs, ours = prefill.sharing, decode.sharing
    if theirs is None or ours is None:
        return Verdict(
            NOTE,
            "one of the agents does not say: it is of an early version, or another user's",
        )
    closed = theirs.closed or ours.closed
    if closed:
        return Verdict(NOTE, closed)
    if theirs.machine != ours.machine:
        return Verdict(NOTE, "the agents are on different machines")
    if theirs.uid != ours.uid:
        return Verdict(
            WARNING,
            f"the prefill agent is of uid {theirs.uid}, the decode agent of uid {ours.uid}",
            "Run both agents as one user.",
        )
    return _met(theirs, ours, engines_met(prefill, decode))


def _met(theirs: Sharing, ours: Sharing, states: dict[str, str]) -> Verdict:
    """What came of it, where nothing that the agents are speaks against it."""
    failed = {engine: state for engine, state in states.items() if state != OPEN}
    if failed:
        engine, reason = next(iter(failed.items()))
        return Verdict(
            WARNING,
            f"engines read with NIXL: {len(failed)} of {len(states)}; '{engine}': {reason}",
            "Do what the reason says. Agents of two containers need the prefill agent's "
            "runtime_dir at the same path in both.",
        )
    if states:
        return Verdict(OK, f"engines whose memory is mapped: {len(states)}")
    if theirs.mount_namespace != ours.mount_namespace:
        return Verdict(
            WARNING,
            f"the agents are in different mount namespaces, and {theirs.path} may not be there in "
            "the decode agent's",
            "Share the prefill agent's runtime_dir, at the same path; or ignore this where it is.",
        )
    return Verdict(OK, "open: one machine, one user; no engine of it was read yet")


def engines_met(prefill: AgentStatus, decode: AgentStatus) -> dict[str, str]:
    """What a decode agent says of a prefill agent's engines that it has met."""
    met = decode.sharing.engines if decode.sharing else {}
    names = {f"{engine} at {prefill.agent_id}": engine for engine in prefill.engines}
    return {engine: met[name] for name, engine in names.items() if name in met}
