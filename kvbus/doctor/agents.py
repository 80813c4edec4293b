"""Says whether agents can have what they want: their ports, folders and staging.

Refuses to listen: a port is bound and let go, so nobody can connect to a probe. A folder that was
made is removed.
"""

import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import msgspec
import psutil

from kvbus.agent.access import Access, load_http_token
from kvbus.agent.config import (
    DEFAULTS,
    AgentConfig,
    convert_config,
    load_shared_config,
)
from kvbus.agent.data_plane import choose_interfaces, is_on_loopback, without_link
from kvbus.agent.sources import variable
from kvbus.bus import ClientCurve, ask_agent, port_range
from kvbus.doctor.advertised import advertise_error, advertise_findings
from kvbus.doctor.agent_network import (
    interfaces_finding,
    is_fenced,
    keys_finding,
    loopback_finding,
)
from kvbus.doctor.finding import ERROR, NOTE, OK, Finding
from kvbus.doctor.sharing import sharing_findings
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.trusted import TrustedKeys
from kvbus.memory.attach.place import check_path_length, prepare_folder
from kvbus.memory.room import available_bytes
from kvbus.protocol.status import AgentStatus, Status
from kvbus.text import bytes_text

ASK_S = 2.0

AgentSource = tuple[str, AgentConfig]


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """One address of an agent.

    ``error`` is empty when it, or a port of its range, can be bound; ``held_by`` is the id of the
    agent that answers there, ``status`` what it says.
    """

    key: str
    address: str
    error: str
    held_by: str = ""
    status: AgentStatus | None = None

    @property
    def host_and_port(self) -> str:
        """The same for each way to write an address."""
        return self.address.removeprefix("tcp://")

    @property
    def port(self) -> str:
        """ "0" lets the system choose one; the first of a range."""
        return self.address.rpartition(":")[2].partition("-")[0]


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent wants; ``source`` is its file, or whose defaults these are.

    ``folder_error`` is empty when the runtime folder is there or can be made, with mode 0700, and
    the path of the socket in it is short enough. ``interfaces`` are those that UCX may use,
    ``down`` those of them without a link; ``trusted`` the roles of the keys but its own that it
    trusts, None without keys.
    """

    source: str
    agent_id: str
    binds: tuple[Bind, ...]
    folder: str
    folder_error: str
    staging_bytes: int
    interfaces: tuple[str, ...]
    interfaces_error: str
    down: tuple[str, ...] = ()
    trusted: frozenset[str] | None = None
    server_key: str = ""
    keys_error: str = ""
    advertise_host: str = ""
    advertise_error: str = ""
    on_loopback: bool = False
    """Whether UCX listens where the other users of the machine reach it, and only they."""
    data_ports: str = ""
    uid: int = 0
    fenced: bool | None = None

    @property
    def is_running(self) -> bool:
        """Whether this very agent answers at one of its addresses."""
        return any(bind.held_by == self.agent_id for bind in self.binds)

    @property
    def status(self) -> AgentStatus | None:
        """What this very agent says, if it runs."""
        found = [bind.status for bind in self.binds if bind.held_by == self.agent_id]
        return found[0] if found else None


def wanted_agents(paths: list[Path]) -> list[AgentSource]:
    """The agents of these files, else of the environment, else of both services' defaults.

    Raises `ConfigError`.
    """
    if paths:
        return [(str(path), load_shared_config(path)) for path in paths]
    if variable("agent_id") in os.environ:
        return [("the environment", load_shared_config(None))]
    return [
        (
            f"the defaults of kvbus-{role}",
            convert_config(AgentConfig, dict(keys), source=f"kvbus-{role}"),
        )
        for role, keys in DEFAULTS.items()
    ]


def check_agents(agents: Sequence[AgentSource]) -> Iterator[Finding]:
    """What came of trying what they want, and what those that run share."""
    facts = [agent_facts(*agent) for agent in agents]
    yield from agent_findings(facts, available_bytes=available_bytes())
    running = {fact.agent_id: fact.status for fact in facts if fact.status is not None}
    yield from sharing_findings(list(running.values()))


def agent_facts(source: str, config: AgentConfig) -> AgentFacts:
    """What came of trying each of them."""
    interfaces, interfaces_error = _interfaces(config)
    curve, keys_error = _curve(config)
    keys = [key for key in ("peer_bind", "events_bind", "http_bind") if getattr(config, key)]
    return AgentFacts(
        source=source,
        agent_id=config.agent_id,
        binds=tuple(_bind(key, getattr(config, key), curve) for key in keys),
        folder=str(config.runtime_path),
        folder_error=_folder_error(config),
        staging_bytes=config.staging_bytes,
        interfaces=interfaces,
        interfaces_error=interfaces_error,
        down=without_link(interfaces),
        trusted=_trusted(config, curve.server_key) if curve else None,
        advertise_host=config.advertise_host,
        advertise_error=advertise_error(config.advertise_host),
        server_key=curve.server_key if curve else "",
        keys_error=keys_error,
        on_loopback=is_on_loopback(config) and bool(not config.mapped or config.data_ports),
        data_ports=config.data_ports,
        uid=_uid(config),
        fenced=is_fenced(config.data_ports, _uid(config)),
    )


def _uid(config: AgentConfig) -> int:
    """The user of the agent, which need not be that of doctor."""
    path = config.runtime_path
    return path.stat().st_uid if path.exists() else os.geteuid()


def _curve(config: AgentConfig) -> tuple[ClientCurve | None, str]:
    """What the agent is asked with, its own key at both ends, and what is wrong with its keys."""
    try:
        keys = Access.open(config).keys
        load_http_token(config)
    except ConfigError as error:
        return None, error.message
    return ClientCurve(keys, keys.public) if keys else None, ""


def _trusted(config: AgentConfig, own_key: str) -> frozenset[str]:
    trusted = TrustedKeys(Path(config.authorized_keys))
    return frozenset(role for one in trusted if one.key != own_key for role in one.roles)


def _interfaces(config: AgentConfig) -> tuple[tuple[str, ...], str]:
    try:
        return choose_interfaces(config), ""
    except ConfigError as error:
        return (), error.message


def _bind(key: str, address: str, curve: ClientCurve | None) -> Bind:
    errors = {one: _bind_error(one) for one in port_range(address)}
    in_use = os.strerror(errno.EADDRINUSE)
    taken = [one for one, error in errors.items() if key == "peer_bind" and error == in_use]
    answers = [anyio.run(_status_at, one, curve) for one in taken]
    status = next((one for one in answers if one is not None), None)
    held_by = status.agent_id if status is not None else ""
    error = "" if "" in errors.values() else errors.popitem()[1]
    return Bind(key=key, address=address, error=error, held_by=held_by, status=status)


def _bind_error(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    by_bus = address.startswith("tcp://")  # ZeroMQ: of IPv4, and takes names of interfaces
    try:
        host = (_interface_address(host) if by_bus else "") or host or "127.0.0.1"
        found = socket.getaddrinfo(
            None if host == "*" else host.strip("[]"),
            int(port),
            family=socket.AF_INET if by_bus else socket.AF_UNSPEC,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        family, *_, socket_address = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket_address)
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", "") or str(error)
    return ""


def _interface_address(name: str) -> str:
    """The IPv4 address of an interface; empty when there is none of this name."""
    found = psutil.net_if_addrs().get(name, ())
    return next((one.address for one in found if one.family == socket.AF_INET), "")


async def _status_at(address: str, curve: ClientCurve | None) -> AgentStatus | None:
    """What the agent says that answers there, None when none does."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    here = "127.0.0.1" if host in ("*", "0.0.0.0") else host  # noqa: S104 - compared
    try:
        endpoint = f"tcp://{here}:{port}"
        return await ask_agent(endpoint, Status(), timeout_s=ASK_S, curve=curve)
    except KVBusError:
        return None


def _folder_error(config: AgentConfig) -> str:
    try:
        check_path_length(config.attach_path)
        with _leaving_nothing(config.runtime_path):
            prepare_folder(config.runtime_path)
            if not os.access(config.runtime_path, os.W_OK | os.X_OK):
                return f"the runtime directory {config.runtime_path} cannot be written to"
    except ConfigError as error:
        return error.message
    return ""


@contextlib.contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """Remove, at the end, the folder and those above it, as far as they were not there before."""
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    finally:
        for path in new:  # the innermost first
            with contextlib.suppress(OSError):
                path.rmdir()


def agent_findings(agents: Sequence[AgentFacts], *, available_bytes: int) -> Iterator[Finding]:
    """Each agent's ports and folder, then what they want together."""
    for name, agent in zip(_names(agents), agents, strict=True):
        yield from _ports(name, agent)
        yield Finding(
            f"agents.{name}.runtime_dir",
            ERROR if agent.folder_error else OK,
            agent.folder_error or agent.folder,
            {"folder": agent.folder, "error": agent.folder_error},
            why=f"Engines meet their agent in this folder ({agent.source}).",
            fix="Set runtime_dir to a folder of this user, with mode 0700 and a short path.",
        )
        yield interfaces_finding(
            name,
            agent.source,
            interfaces=agent.interfaces,
            down=agent.down,
            error=agent.interfaces_error,
        )
        if agent.on_loopback:
            yield loopback_finding(
                name,
                agent.source,
                ports=agent.data_ports,
                uid=agent.uid,
                fenced=agent.fenced,
            )
        yield keys_finding(
            name,
            agent.source,
            key=agent.server_key,
            trusted=agent.trusted,
            role=agent.status.role if agent.status is not None else "",
            error=agent.keys_error,
        )
        yield from advertise_findings(name, agent.advertise_host, agent.advertise_error)
    yield from _clashes(agents)
    wanted_bytes = sum(agent.staging_bytes for agent in agents if not agent.is_running)
    yield Finding(
        "agents.staging",
        OK if wanted_bytes <= available_bytes else ERROR,
        f"{bytes_text(wanted_bytes)} wanted, {bytes_text(available_bytes)} available",
        {"wanted_bytes": wanted_bytes, "available_bytes": available_bytes},
        why="An agent reserves its staging when it starts, and does not start without it.",
        fix="Make staging_bytes smaller, or free memory.",
    )


def _names(agents: Sequence[AgentFacts]) -> Iterator[str]:
    """The id of each; where several files have one, with a number from the second on."""
    seen: Counter[str] = Counter()
    for agent in agents:
        seen[agent.agent_id] += 1
        number = seen[agent.agent_id]
        yield agent.agent_id if number == 1 else f"{agent.agent_id}#{number}"


def _ports(name: str, agent: AgentFacts) -> Iterator[Finding]:
    name = f"agents.{name}"
    values = {bind.key: bind.address for bind in agent.binds}
    if agent.is_running:
        yield Finding(f"{name}.ports", NOTE, "the agent runs already, and has its ports", values)
        return
    taken = [bind for bind in agent.binds if bind.error]
    for bind in taken:
        by = f", by the agent '{bind.held_by}'" if bind.held_by else ""
        yield Finding(
            f"{name}.{bind.key}",
            ERROR,
            f"{bind.address} cannot be bound{by}: {bind.error}",
            {"address": bind.address, "error": bind.error, "held_by": bind.held_by},
            why=f"The agent does not start without it ({agent.source}).",
            fix="End what holds it, or choose another address.",
            command=f"ss -ltnp 'sport = :{bind.port}'",
        )
    if not taken:
        free = ", ".join(bind.host_and_port for bind in agent.binds)
        yield Finding(f"{name}.ports", OK, f"free: {free}", values)


def _clashes(agents: Sequence[AgentFacts]) -> Iterator[Finding]:
    binds = [bind for agent in agents for bind in agent.binds if bind.port != "0"]
    wanted = Counter(bind.host_and_port for bind in binds)
    wanted += Counter(one for agent in agents for one in (agent.agent_id, agent.folder))
    twice = [one for one, count in wanted.items() if count > 1]
    if twice:
        yield Finding(
            "agents.clash",
            ERROR,
            f"wanted more than once: {', '.join(twice)}",
            {"wanted_twice": twice},
            why="Each address, agent_id and runtime_dir can be had once.",
            fix="Choose another in one of the files.",
        )
