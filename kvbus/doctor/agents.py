"""Checks of agents' configurations, by their own start-up functions, and of their faults."""

import contextlib
import errno
import os
import shlex
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from kvbus.agent.access import Access, load_http_token
from kvbus.agent.config import (
    DEFAULTS,
    AgentConfig,
    convert_config,
    http_address,
    load_shared_config,
)
from kvbus.agent.data_plane import choose_interfaces, is_on_loopback, without_link
from kvbus.agent.sources import variable
from kvbus.bus import ClientCurve, SocketOptions, new_context, open_router, port_range
from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.doctor.peers import QueriedAgent, address_of, faults_of, how_kv_comes
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.trusted import TrustedKeys
from kvbus.memory.attach.socket_paths import check_path_length, prepare_folder
from kvbus.memory.memory_limits import available_bytes
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.tools import AgentStatus
from kvbus.text import bytes_text

BINDS = ("peer_bind", "events_bind", "http_bind")
AgentSource = tuple[str, AgentConfig]


def wanted_agents(paths: list[Path]) -> list[AgentSource]:
    """Return the agents of ``paths``, else of the environment, else both defaults."""
    if paths:
        return [(str(path), load_shared_config(path)) for path in paths]
    if variable("agent_id") in os.environ:
        return [("the environment", load_shared_config(None))]
    defaults = {f"kvbus-{role}": dict(keys) for role, keys in DEFAULTS.items()}
    return [
        (f"the defaults of {service}", convert_config(AgentConfig, keys, source=service))
        for service, keys in defaults.items()
    ]


def check_agents(agents: Sequence[AgentSource]) -> Iterator[Finding]:
    seen, wanted = Counter[str](), Counter[str]()
    running: dict[str, AgentStatus] = {}
    staging_bytes = 0
    for source, config in agents:
        seen[config.agent_id] += 1
        number = seen[config.agent_id]
        name = f"agents.{config.agent_id}" + (f"#{number}" if number > 1 else "")
        binds = {key: getattr(config, key) for key in BINDS if getattr(config, key)}
        fixed = [one.removeprefix("tcp://") for one in binds.values() if not one.endswith(":0")]
        wanted.update([config.agent_id, str(config.runtime_path), *fixed])
        held_by = _holder(config.peer_bind, _curve(config)[0])
        if held_by is not None and held_by.agent_id == config.agent_id:
            running[config.agent_id] = held_by
            found = "the agent runs already, and has its ports"
            yield Finding(f"{name}.ports", NOTE, found, binds)
            yield faults_of(f"{name}.faults", held_by)
        else:
            staging_bytes += config.staging_bytes
            yield from _ports(name, source, binds, held_by)
            yield _folder(name, source, config)
            yield _interfaces(name, source, config)
            yield _keys(name, source, config)
        yield from _loopback(name, source, config)
        yield from _advertised(name, config.advertise_host)
    if twice := [one for one, count in wanted.items() if count > 1]:
        yield Finding(
            "agents.clash",
            ERROR,
            f"wanted more than once: {', '.join(twice)}",
            {"wanted_twice": twice},
            why="Each address, agent_id and runtime_dir can be had once.",
            fix="Choose another in one of the files.",
        )
    room_bytes = available_bytes()
    yield Finding(
        "agents.staging",
        OK if staging_bytes <= room_bytes else ERROR,
        f"{bytes_text(staging_bytes)} wanted, {bytes_text(room_bytes)} available",
        {"wanted_bytes": staging_bytes, "available_bytes": room_bytes},
        why="An agent reserves its staging when it starts, and does not start without it.",
        fix="Make staging_bytes smaller, or free memory.",
    )
    for prefill, decode in product(running.values(), repeat=2):
        if (prefill.role, decode.role) == (AgentRole.PREFILL, AgentRole.DECODE):
            yield how_kv_comes(f"agents.{decode.agent_id}.maps.{prefill.agent_id}", prefill, decode)


def _curve(config: AgentConfig) -> tuple[ClientCurve | None, str]:
    try:
        keys = Access.open(config).keys
        load_http_token(config)
    except ConfigError as error:
        return None, error.message
    return ClientCurve(keys, keys.public) if keys else None, ""


def _holder(peer_bind: str, curve: ClientCurve | None) -> AgentStatus | None:
    for address in port_range(peer_bind):
        if _bind_error(address) == os.strerror(errno.EADDRINUSE):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            host = "127.0.0.1" if host in ("*", "0.0.0.0") else host  # noqa: S104 - compared
            with contextlib.suppress(KVBusError):
                return QueriedAgent(f"tcp://{host}:{port}", curve).status()
    return None


def _ports(
    name: str, source: str, binds: Mapping[str, str], held_by: AgentStatus | None
) -> Iterator[Finding]:
    errors = {key: _bind_error(address) for key, address in binds.items()}
    for key, error in errors.items():
        if not error:
            continue
        address, holder = binds[key], held_by.agent_id if held_by and key == "peer_bind" else ""
        by = f", by the agent '{holder}'" if holder else ""
        port = address.rpartition(":")[2].partition("-")[0]
        yield Finding(
            f"{name}.{key}",
            ERROR,
            f"{address} cannot be bound{by}: {error}",
            {"address": address, "error": error, "held_by": holder},
            why=f"The agent does not start without it ({source}).",
            fix="End what holds it, this agent itself if it runs, or choose another address.",
            command=f"ss -ltnp 'sport = :{port}'",
        )
    if not any(errors.values()):
        free = ", ".join(address.removeprefix("tcp://") for address in binds.values())
        yield Finding(f"{name}.ports", OK, f"free: {free}", binds)


def _bind_error(address: str) -> str:
    try:
        if not address.startswith("tcp://"):
            family, *_, at = socket.getaddrinfo(*http_address(address))[0]
            socket.create_server(at, family=family).close()
            return ""
        with new_context() as context:
            open_router(context, address, SocketOptions()).close(linger=0)
    except (OSError, ConfigError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        number = getattr(cause, "errno", 0) or 0
        return os.strerror(number) if number in errno.errorcode else str(error)
    return ""


def _folder(name: str, source: str, config: AgentConfig) -> Finding:
    folder, problem = config.runtime_path, ""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        check_path_length(config.attach_path)
        prepare_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            problem = f"the runtime directory {folder} cannot be written to"
    except ConfigError as error:
        problem = error.message
    finally:
        for path in missing:  # the innermost first
            with contextlib.suppress(OSError):
                path.rmdir()
    return Finding(
        f"{name}.runtime_dir",
        ERROR if problem else OK,
        problem or str(folder),
        {"folder": str(folder), "error": problem},
        why=f"Engines attach to their agent in this folder ({source}).",
        fix="Set runtime_dir to a folder of this user, with mode 0700 and a short path.",
    )


def _interfaces(name: str, source: str, config: AgentConfig) -> Finding:
    try:
        interfaces, problem = choose_interfaces(config), ""
    except ConfigError as error:
        interfaces, problem = (), error.message
    down = without_link(interfaces)
    severity, found = ERROR if problem else OK, problem or f"UCX listens on {', '.join(interfaces)}"
    why = f"Whoever reaches UCX over TCP reads and writes any memory of the agent ({source})."
    fix = "Name the interfaces that only agents reach in data_interfaces."
    if down:
        severity = ERROR if len(down) == len(interfaces) else WARNING
        found += f"; without a link now: {', '.join(down)}"
        why = (
            "No KV comes or goes over an interface without a link. Where none has one an agent is "
            f"not ready ({source})."
        )
        fix = "Check the cable, the network of the pod or machine, or the interface itself."
    return Finding(
        f"{name}.interfaces",
        severity,
        found,
        {"interfaces": interfaces, "down": down, "error": problem},
        why=why,
        fix=fix,
        command="ip -brief link; ip -brief address",
    )


def _loopback(name: str, source: str, config: AgentConfig) -> Iterator[Finding]:
    ports, path = config.data_ports, config.runtime_path
    if not is_on_loopback(config) or (config.mapped and not ports):
        return
    uid = path.stat().st_uid if path.exists() else os.geteuid()  # the agent's, maybe not ours
    rule = (
        f"-o lo -p tcp --dport {(ports or 'FIRST-LAST').replace('-', ':')} -m owner "
        f"! --uid-owner {uid} -j REJECT"
    )
    access, is_fenced = "not checked", False
    if ports and shutil.which("iptables"):
        check = shlex.split(f"iptables -C OUTPUT {rule}")
        status = subprocess.run(check, capture_output=True, check=False).returncode
        is_fenced = status == 0
        access = {0: "kept from other users", 1: "open to other users"}.get(status, access)
    yield Finding(
        f"{name}.loopback",
        OK if is_fenced else WARNING,
        f"ports {ports or 'of any number'} of UCX on loopback: {access}",
        {"ports": ports, "fenced": is_fenced},
        why="Each user of this machine who reaches UCX on loopback reads and writes any memory of "
        f"the agent ({source}). Where other users have no processes here, this does not matter.",
        fix="Let agents of one user map memory (mapped = true), or set data_ports, and have root "
        "add the rule; iptables shows rules to root alone.",
        command=f"iptables -A OUTPUT {rule}",
    )


def _keys(name: str, source: str, config: AgentConfig) -> Finding:
    curve, problem = _curve(config)
    key, severity = curve.server_key if curve else "", ERROR if problem else OK
    found = problem or key or "no keys: this machine alone, or a closed network"
    if key and not any(
        one.key != key and one.roles & {"prefill", "decode"}
        for one in TrustedKeys(Path(config.authorized_keys))
    ):
        severity = WARNING
        found = f"{key}, but authorized_keys trusts no other key as decode or prefill"
    return Finding(
        f"{name}.keys",
        severity,
        found,
        {"server_key": key, "error": problem},
        why="Keys authenticate the clients of an agent, and encrypt the connection. Agents with "
        f"keys hand over KV only with agents that they trust ({source}).",
        fix="Make keys, trust that of the other agent in the file that authorized_keys names, and "
        "name them in key_file and authorized_keys.",
        command="kvbus keys trust FILE 'KEY' --name NAME --role ROLE",
    )


def _advertised(name: str, host: str) -> Iterator[Finding]:
    if not host:
        return
    try:
        with new_context() as context:
            address = address_of(host)
            is_here = context.is_here(address)
        problem = "" if is_here else f"{address} is no address of this machine"
    except KVBusError as error:
        problem = error.message
    yield Finding(
        f"{name}.advertise_host",
        WARNING if problem else OK,
        f"'{host}': {problem}" if problem else f"others receive '{host}'",
        {"advertise_host": host, "error": problem},
        why="Tickets carry it. Unless it leads here by a NAT or a proxy nobody reaches the agent, "
        "and fetches fail with peer_unreachable.",
        fix="Set advertise_host to the address by which other machines reach this one, and "
        "check it from one of them: kvbus doctor --only peer --peer tcp://HOST:PORT.",
        command="ip -brief address",
    )
