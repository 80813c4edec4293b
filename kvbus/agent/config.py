"""Configuration of an agent."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvbus.agent.sources import RawConfig, describe_error, gather, kinds_of, variable
from kvbus.bus import with_brackets
from kvbus.data.messages import UCX, Backends
from kvbus.errors import ConfigError
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.peer import MAX_BACKENDS

DEFAULTS: Mapping[AgentRole, Mapping[str, str]] = {
    role: {
        "agent_id": f"{role}-0",
        "peer_bind": f"tcp://127.0.0.1:{port}",
        "events_bind": f"tcp://127.0.0.1:{port + 1}",
        "http_bind": f"127.0.0.1:{port + 2}",
    }
    for role, port in ((AgentRole.PREFILL, 7701), (AgentRole.DECODE, 7711))
}
"""For keys without a default in a printed configuration, and for the HTTP port."""
Duration = Annotated[float, Meta(gt=0, le=86_400)]
Bound = Annotated[int, Meta(ge=1, le=1 << 20)]
ConfiguredBackend = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_]{1,32}$", extra={"expected": "names such as UCX or LIBFABRIC"}),
]
MEMORY_SOCKET = "memory.sock"
MAX_PORT = 65_535
CLOSES_WITHIN_S = 3.0


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of both agents; each service adds its own."""

    called: ClassVar[str] = "an agent"

    agent_id: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            extra={"expected": "1 to 64 letters of ASCII, digits, dots, underscores and hyphens"},
        ),
    ]
    """Name of this agent in logs, metrics and tickets; unique in the cluster."""
    peer_bind: str
    """Address for other agents, tcp://HOST:PORT. HOST *: all addresses, IPv6 and IPv4. PORT 0: a
    free one; FIRST-LAST: the first free one of a range."""
    events_bind: str
    """Address for subscribers to events; format as peer_bind."""
    advertise_host: str = ""
    """Host for others to connect to; required if an address above is a wildcard."""
    key_file: str = ""
    """Secret key of this agent, mode 0600, made by kvbus keys new. Empty: no encryption, and
    everyone is accepted."""
    authorized_keys: str = ""
    """File of trusted public keys, added by kvbus keys trust; read again when it changes."""
    insecure: bool = False
    """Whether to allow addresses other than loopback without keys."""
    data_interfaces: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Network interfaces or RDMA devices for KV, such as ["eth0"] or ["mlx5_0:1"]. Empty:
    UCX_NET_DEVICES, or loopback if the addresses above are loopback."""
    data_ports: Annotated[str, Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$")] = ""
    """TCP ports of UCX, FIRST-LAST, for firewall rules: 16 for each agent of the machine. Empty:
    UCX_TCP_PORT_RANGE, or any."""
    nixl_backends: Annotated[
        tuple[ConfiguredBackend, ...], Meta(min_length=1, max_length=MAX_BACKENDS)
    ] = (UCX,)
    """Backends of NIXL, preferred first; kvbus doctor lists them. A decode agent reads with its
    first one that the prefill agent has."""
    nixl_backend_params: dict[str, dict[str, str | int | bool]] = {}
    """Parameters by backend, in tables such as [nixl_backend_params.LIBFABRIC]. In the environment
    and with --set: LIBFABRIC.num_threads=4, separated by commas."""
    ticket_keys: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    """Files of keys that sign tickets, one in each, mode 0600. The first signs; all verify. Empty:
    tickets are unsigned, and all are accepted."""
    runtime_dir: str = ""
    """Folder of the sockets for local engines, mode 0700. Its parents belong to this user or root;
    others may write only to sticky ones. Empty: kvbus-UID/AGENT_ID in XDG_RUNTIME_DIR or /tmp."""
    http_bind: str = ""
    """HOST:PORT for /metrics, /healthz, /readyz and /status; empty: none. Other addresses than
    loopback require http_token_file."""
    http_token_file: str = ""
    """File, mode 0600, with the token for all paths but /healthz and /readyz: a bearer token, or
    the password of any user."""
    engine_wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    """Wait after a start for earlier engines. Meanwhile, requests for them are refused with
    `engine_not_ready`, and retried."""
    ready_needs_engine: bool = False
    """Whether /readyz returns 503 until an engine is attached."""
    otlp_endpoint: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s/]+(/\S*)?)?$",
            extra={"expected": "http://HOST:PORT or https://HOST:PORT, or nothing"},
        ),
    ] = ""
    """OpenTelemetry collector for spans, OTLP over HTTP, such as http://127.0.0.1:4318; requires
    kvbus[otel]. Empty: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest logged level."""
    drain_timeout_s: Duration = 30.0
    """Wait of a stop for offers and fetches in progress; then they fail."""
    heartbeat_s: Duration = 2.0
    """Interval of heartbeat events."""
    max_ended_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 40 << 20
    """Memory limit for records of ended offers or fetches, about 2 KiB each: those of the last
    minute, and at least the last 1,024."""
    staging_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 128 << 20
    """Memory for staged and packed transfers. 0: none; KV of another shape is read in small
    pieces."""
    gpu_slots: Literal["auto", "host", "gpu"] = "auto"
    """Staging slots for GPUs: pinned memory of the `host`, or memory of the `gpu`. `auto`: `gpu` if
    data_interfaces have an RDMA device. Agents that read from each other on one machine need the
    same."""
    mapped: bool = True
    """Whether a prefill agent lends its engines' memory to decode agents of the same user on this
    machine, which copy from it."""
    exposure: Literal["memory", "staging"] = "memory"
    """Memory that is registered with NIXL. `memory`: KV caches and staging slots. `staging`: only
    the slots; a prefill agent zeroes them after use."""
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 30, multiple_of=4096)] = 8 << 20
    """Size of a staging slot, and so of the largest tile."""
    slice_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 8 << 20
    """Largest post of a transfer, and largest step of a mapped copy."""
    max_handoffs: Bound = 4096
    """Most offers, fetches or holds at a time, draining fetches included; more are `busy`."""
    copy_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    """Threads that gather and scatter tiles, and copy mapped memory."""

    @property
    def backends(self) -> Backends:
        """Parameters by backend, in order of preference."""
        given = self.nixl_backend_params
        return {
            name: {key: _text(value) for key, value in given.get(name, {}).items()}
            for name in self.nixl_backends
        }

    @property
    def runtime_path(self) -> Path:
        if self.runtime_dir:
            return Path(self.runtime_dir)
        base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - made 0700, owner checked
        return Path(base) / f"kvbus-{os.getuid()}" / self.agent_id

    @property
    def attach_path(self) -> Path:
        return self.runtime_path / "attach.sock"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield keys that contradict others, with the reason."""
        yield from ()


C = TypeVar("C", bound=AgentConfig)
_HOST = re.compile(r"[^\s/:\[\]]*|\[[0-9A-Fa-f:.]+(%[^\s/:\[\]]+)?\]")


def load_config(kind: type[C], path: Path | None, *, settings: Iterable[str] = ()) -> C:
    """Raise `ConfigError` that names key and source."""
    return _converted(kind, gather(kind, path, settings=settings, called=kind.called), path)


def load_shared_config(path: Path | None) -> AgentConfig:
    """Read the keys of both agents, and ignore others; raise `ConfigError`."""
    return _converted(AgentConfig, gather(AgentConfig, path, knows_all=False), path)


def _converted(kind: type[C], given: RawConfig, path: Path | None) -> C:
    source = str(path or "the environment and --set")
    for field in msgspec.structs.fields(kind):
        key = field.encode_name
        if field.required and key not in given.values:
            raise ConfigError(
                f"{source}: key '{key}' is missing: write it into CONFIG.toml (--print-config "
                f"shows one), or set {variable(key)} or --set {key}=VALUE",
                key=key,
            )
    return convert_config(kind, given.values, source=source, origins=given.origins)


def convert_config(
    kind: type[C],
    fields: dict[str, Any],
    *,
    source: str,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> C:
    try:
        config = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        key = str(error).partition(" - at `$.")[2].rstrip("`").partition("[")[0]
        reason = describe_error(error, fields.get(key), kinds_of(kind).get(key))
        named = f"key '{key}': " if key else ""
        raise ConfigError(f"{origins.get(key, source)}: {named}{reason}", key=key) from error
    config = _with_brackets(config)
    for key, problem in _problems(config):
        raise ConfigError(f"{origins.get(key, source)}: key '{key}': {problem}", key=key)
    return config


def _with_brackets(config: C) -> C:
    binds = {key: getattr(config, key) for key in ("peer_bind", "events_bind")}
    for key, address in binds.items():
        host = bind_host(address)
        binds[key] = address.replace(f"//{host}:", f"//{with_brackets(host)}:", 1)
    host = with_brackets(config.advertise_host)
    return msgspec.structs.replace(config, advertise_host=host, **binds)


def _problems(config: AgentConfig) -> Iterator[tuple[str, str]]:
    for key in ("peer_bind", "events_bind"):
        address = getattr(config, key)
        host, ports = bind_host(address), address.rpartition(":")[2].split("-")
        if not address.startswith("tcp://") or not host or not _are_ports(ports):
            yield (
                key,
                f"'{address}' is neither tcp://HOST:PORT nor tcp://HOST:FIRST-LAST, with ports "
                f"up to {MAX_PORT}",
            )
        is_wildcard = host in ("*", "0.0.0.0", "[::]")  # noqa: S104 - compared
        if is_wildcard and not config.advertise_host:
            yield "advertise_host", f"needed, because {key} binds every interface"
        if host == "0.0.0.0" and config.advertise_host.startswith("["):  # noqa: S104 - compared
            yield (
                key,
                f"'{address}' binds IPv4 alone, and advertise_host is IPv6: write tcp://*:PORT",
            )
    if not _HOST.fullmatch(config.advertise_host):
        yield (
            "advertise_host",
            f"'{config.advertise_host}' is neither a host name nor an IP address; it has no tcp:// "
            "and no port",
        )
    host, _, port = config.http_bind.rpartition(":")
    if config.http_bind and not (host and _are_ports([port])):
        yield (
            "http_bind",
            f"'{config.http_bind}' is not HOST:PORT, with a port up to {MAX_PORT}",
        )
    if 0 < config.staging_bytes < config.slot_bytes:
        yield (
            "staging_bytes",
            f"{config.staging_bytes} is less than one slot of 'slot_bytes' = "
            f"{config.slot_bytes}; make it larger, or 0 to have no slots",
        )
    yield from _backend_problems(config)
    yield from config.problems()


def _backend_problems(config: AgentConfig) -> Iterator[tuple[str, str]]:
    names = config.nixl_backends
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield "nixl_backends", f"named twice: {', '.join(twice)}"
    if others := sorted(config.nixl_backend_params.keys() - set(names)):
        yield (
            "nixl_backend_params",
            f"{', '.join(others)} is not among nixl_backends, which has {', '.join(names)}",
        )


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Prefix a `ConfigError` raised inside with this key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"key '{key}': {error.message}", key=key) from error


def _are_ports(ports: Sequence[str]) -> bool:
    if not all(port.isascii() and port.isdigit() and int(port) <= MAX_PORT for port in ports):
        return False  # ZeroMQ would wrap a larger one
    return len(ports) == 1 or (len(ports) == 2 and 0 < int(ports[0]) <= int(ports[1]))


def bind_host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


def http_address(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    return host.strip("[]"), int(port)
