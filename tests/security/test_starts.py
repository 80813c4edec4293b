"""What an agent does not start with: no keys where others reach it, files that others can read."""

import re
from pathlib import Path
from typing import Any

from tests.agents import AgentProcess, Agents, agents_ended
from tests.keyring import KeyRing

EXPOSED = {"peer_bind": "tcp://0.0.0.0:0", "advertise_host": "host"}
"""Whoever reaches this machine may connect."""
Refused = tuple[str, dict[str, Any], str]


def refused(folder: Path) -> dict[str, Refused]:
    """By what is wrong: the role, the settings that differ, and what is said of it."""
    ring = KeyRing(folder)
    keys, readable = ring.settings("p"), ring.settings("readable")
    ring.secret_path("readable").chmod(0o644)
    files = {"short": b"short", "long": b"x" * 5000, "shared": b"k" * 32}
    for name, key in files.items():
        (folder / name).write_bytes(key + b"\n")
        (folder / name).chmod(0o640 if name == "shared" else 0o600)

    def tickets(name: str, said: str, role: str = "prefill") -> Refused:
        return role, {"ticket_keys": [str(folder / name)]}, f"'ticket_keys'.*{said}"

    def alone(key: str) -> dict[str, Any]:
        return {key: keys[key]}

    insecure = {**EXPOSED, "insecure": True}
    return {
        "peers without keys": ("prefill", EXPOSED, "insecure = true"),
        "events without keys": (
            "decode",
            {"events_bind": "tcp://0.0.0.0:0", "advertise_host": "host"},
            "insecure = true",
        ),
        "a key and nobody trusted": ("prefill", alone("key_file"), "'authorized_keys': needed"),
        "trust without a key": ("prefill", alone("authorized_keys"), "'key_file': needed"),
        "a key that others read": ("prefill", readable, "others can read the secret in it"),
        "ticket keys that others read": tickets("shared", "others can read the secret in it"),
        "a ticket key that is short": tickets("short", "has a key of 5 bytes; 32 at least"),
        "a ticket key that is long": tickets("long", "larger than 4096 bytes"),
        "no ticket key to sign": tickets("none", "cannot read"),
        "no ticket key to check": tickets("none", "cannot read", "decode"),
        "any interface for KV": ("prefill", insecure, "'data_interfaces': needed"),
        "any interface, with keys": ("decode", {**EXPOSED, **keys}, "'data_interfaces': needed"),
        "an interface that is not there": (
            "prefill",
            {"data_interfaces": ["lo", "eth99", "ib_7:1"]},
            "has no eth99, ib_7:1; it has .*lo",
        ),
    }


def test_what_is_not_safe_or_not_there_is_refused_at_the_start_by_its_key(tmp_path: Path) -> None:
    """Side by side, as a start takes a second."""
    wrong = refused(tmp_path)
    with agents_ended(Agents) as agents:
        launched: dict[str, AgentProcess] = {
            why: agents.prepare(role, **settings) for why, (role, settings, _) in wrong.items()
        }
        for agent in launched.values():
            agent.launch()
        ended = {
            why: (agent.exit_status(), "\n".join(agent.lines())) for why, agent in launched.items()
        }

    for why, (_, _, said) in wrong.items():
        status, text = ended[why]
        assert status == 1, why
        assert re.search(said, text), (why, text)
