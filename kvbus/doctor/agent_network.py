"""Says of one agent by which interfaces it moves KV, whether these are up, and whom it trusts."""

import shlex
import shutil
import subprocess
from collections.abc import Collection

from kvbus.doctor.finding import ERROR, OK, WARNING, Finding

BOTH_ROLES = frozenset(("prefill", "decode"))


def interfaces_finding(
    agent_id: str, source: str, *, interfaces: tuple[str, ...], down: Collection[str], error: str
) -> Finding:
    """Those that UCX may use; ``down`` are those of them without a link."""
    name = f"agents.{agent_id}.interfaces"
    values = {"interfaces": list(interfaces), "down": list(down), "error": error}
    if down and not error:
        every = len(down) == len(interfaces)
        listed = ", ".join(down)
        return Finding(
            name,
            ERROR if every else WARNING,
            f"UCX listens on {', '.join(interfaces)}; without a link now: {listed}",
            values,
            why="No KV comes or goes over an interface without a link. Where none has one an agent "
            f"is not ready ({source}).",
            fix="See to the cable, the network of the pod or machine, or the interface itself.",
            command="ip -brief link",
        )
    return Finding(
        name,
        ERROR if error else OK,
        error or f"UCX listens on {', '.join(interfaces)}",
        values,
        why=f"Whoever reaches UCX over TCP reads and writes any memory of the agent ({source}).",
        fix="Name the interfaces that only agents reach in data_interfaces.",
        command="ip -brief address",
    )


def fence_command(ports: str, uid: int) -> str:
    """The rule that keeps all users of the machine but one from ports of UCX on loopback."""
    return (
        f"iptables -A OUTPUT -o lo -p tcp --dport {ports.replace('-', ':')} -m owner "
        f"! --uid-owner {uid} -j REJECT"
    )


def is_fenced(ports: str, uid: int) -> bool | None:
    """Whether the rule is there; None where that cannot be looked at."""
    if not ports or shutil.which("iptables") is None:
        return None
    looking = fence_command(ports, uid).replace(" -A ", " -C ", 1)
    ended = subprocess.run(shlex.split(looking), capture_output=True, check=False)
    return {0: True, 1: False}.get(ended.returncode)


def loopback_finding(
    agent_id: str, source: str, *, ports: str, uid: int, fenced: bool | None
) -> Finding:
    """Of an agent that may open UCX on loopback; ``fenced`` is what `is_fenced` says."""
    there = {True: "kept from other users", False: "open to other users", None: "not looked at"}
    return Finding(
        f"agents.{agent_id}.loopback",
        OK if fenced else WARNING,
        f"ports {ports or 'of any number'} of UCX on loopback: {there[fenced]}",
        {"ports": ports, "fenced": fenced},
        why="Each user of this machine who reaches UCX on loopback reads and writes any memory of "
        f"the agent ({source}). Where nobody else has processes here that is nothing.",
        fix="Let agents of one user map memory (mapped = true), or set data_ports, and have root "
        "add the rule; iptables shows rules to root alone.",
        command=fence_command(ports or "FIRST-LAST", uid),
    )


def keys_finding(
    agent_id: str, source: str, *, key: str, trusted: Collection[str] | None, role: str, error: str
) -> Finding:
    """Its keys; ``trusted`` are the roles of the other keys that it trusts, None where unknown.

    ``role`` is its own, empty when it does not run.
    """
    name = f"agents.{agent_id}.keys"
    values = {"server_key": key, "error": error}
    wanted = BOTH_ROLES - {role}
    if key and trusted is not None and wanted.isdisjoint(trusted):
        others = " or ".join(sorted(wanted))
        return Finding(
            name,
            WARNING,
            f"{key}, but authorized_keys trusts no other key as {others}",
            values,
            why="Agents with keys hand over KV only with agents whose key they trust in its role "
            f"({source}).",
            fix="Trust the key of the other agent, in the file that authorized_keys names.",
            command="kvbus keys trust FOLDER 'KEY' --name NAME --role "
            + (others if role else "ROLE"),
        )
    return Finding(
        name,
        ERROR if error else OK,
        error or key or "no keys: this machine alone, or a closed network",
        values,
        why=f"Keys say who may ask the agent, and encrypt what is said ({source}).",
        fix="Make and trust keys, and name them in key_file and authorized_keys.",
        command="kvbus keys --help",
    )
