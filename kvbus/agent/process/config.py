"""Configuration of an agent: TOML into typed structs, and a commented default.

Refuses unknown keys, wrong types and values out of range with a `ConfigError` that names the key
and the file.
"""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from kvbus.agent.process.addresses import BINDS, check_address
from kvbus.agent.process.connection_config import ConnectionConfig
from kvbus.errors import ConfigError

Duration = Annotated[float, Meta(gt=0, le=86_400)]
Bound = Annotated[int, Meta(ge=1, le=1 << 20)]
MEMORY_SOCKET = "memory.sock"


class TransportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the agent moves bytes with NIXL."""

    slice_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            le=1 << 30,
            description="Largest post of one transfer, and largest part of a copy out of mapped "
            "memory, in bytes.",
        ),
    ] = 8 << 20
    slice_descriptors: Annotated[
        int, Meta(ge=1, le=1 << 16, description="Most descriptors in one post.")
    ] = 2048
    close_timeout_s: Annotated[
        Duration, Meta(description="How long a stop waits for posted transfers to end.")
    ] = 5.0


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both agents need; each service adds its own keys."""

    agent_id: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="Name of this agent in logs, metrics and tickets; unique in the cluster.",
        ),
    ]
    peer_bind: Annotated[
        str,
        Meta(
            description="Where other agents reach this one, tcp://HOST:PORT; port 0 takes a free "
            "one, FIRST-LAST the first free one of a range, so that a successor can start beside "
            "this agent (--replace)."
        ),
    ]
    events_bind: Annotated[
        str, Meta(description="Where subscribers get this agent's events; as peer_bind.")
    ]
    advertise_host: Annotated[
        str,
        Meta(description="Host name that others use; needed when an address above is a wildcard."),
    ] = ""
    key_file: Annotated[
        str,
        Meta(
            description="Secret key of this agent, of mode 0600; made by: kvbus keys new. Empty: "
            "its sockets are neither encrypted nor closed to anybody."
        ),
    ] = ""
    authorized_keys: Annotated[
        str,
        Meta(
            description="Folder of the public keys that are trusted; made by: kvbus keys trust. It "
            "is read again when it changes."
        ),
    ] = ""
    insecure: Annotated[
        bool, Meta(description="Whether an address above may be not loopback without keys.")
    ] = False
    data_interfaces: Annotated[
        tuple[str, ...],
        Meta(
            max_length=64,
            description="Network interfaces or RDMA devices that KV passes over, such as "
            '["eth0"] or ["mlx5_0:1"]. Empty: what UCX_NET_DEVICES names, or loopback when the '
            "addresses above are loopback.",
        ),
    ] = ()
    ticket_keys: Annotated[
        tuple[str, ...],
        Meta(
            max_length=16,
            description="Files with the keys of the site that sign tickets, one in each, of mode "
            "0600. The first signs, any of them verifies. Empty: tickets are not signed, and "
            "anyone's are taken.",
        ),
    ] = ()
    runtime_dir: Annotated[
        str,
        Meta(
            description="Folder of the sockets for the local engine, of mode 0700, below folders "
            "that only this user and root write into. Empty: kvbus-UID/AGENT_ID below "
            "XDG_RUNTIME_DIR, or below /tmp."
        ),
    ] = ""
    metrics_bind: Annotated[
        str, Meta(description="host:port of the Prometheus page; empty turns it off.")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe level that is logged."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="auto: console on a terminal, JSON lines otherwise."),
    ] = "auto"
    drain_timeout_s: Annotated[
        Duration, Meta(description="How long a stop waits for what runs before it fails it.")
    ] = 30.0
    heartbeat_s: Annotated[Duration, Meta(description="Time between heartbeat events.")] = 2.0
    max_engine_processes: Annotated[
        Bound, Meta(description="Most attach connections of local engines at a time.")
    ] = 64
    max_process_connections: Annotated[
        Bound,
        Meta(
            description="Most of these that one process may have: its control session and one for "
            "each rank that it holds."
        ),
    ] = 48
    max_process_segments: Annotated[
        Bound, Meta(description="Most segments of memory on one attach connection.")
    ] = 4096
    max_refusal_lines_s: Annotated[
        Bound,
        Meta(
            description="Most lines a second in the log about refused requests and keys and "
            "about ended connections; a quarter of them about the same peer."
        ),
    ] = 20
    max_ended_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 40,
            description="Memory for what is known of offers or fetches that have ended, some 2 KiB "
            "each, so that who asks again when a reply was lost gets the same answer.",
        ),
    ] = 64 << 20
    max_reply_bytes: Annotated[
        int,
        Meta(
            ge=17 << 20,
            le=1 << 40,
            description="Memory for replies that are kept for requests that come again, on each of "
            "the two sockets for requests.",
        ),
    ] = 32 << 20
    staging_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Memory of this agent that packed transfers pass through; 0 turns them "
            "off, so that KV of another shape goes in small pieces.",
        ),
    ] = 128 << 20
    mapped: Annotated[
        bool,
        Meta(
            description="Whether a prefill agent lends the memory of its engines, read-only, to "
            "decode agents of this machine and user, and whether a decode agent maps it and "
            "copies from there."
        ),
    ] = True
    exposure: Annotated[
        Literal["memory", "staging"],
        Meta(
            description="What NIXL is told of: `memory`, the KV caches of engines and the staging "
            "slots; `staging`, the slots alone, which a prefill agent zeroes after use."
        ),
    ] = "memory"
    slot_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            le=1 << 30,
            multiple_of=4096,
            description="Size of one staging slot, and so of the largest packed box.",
        ),
    ] = 8 << 20
    transport: TransportConfig = TransportConfig()
    connections: ConnectionConfig = ConnectionConfig()

    @property
    def runtime_path(self) -> Path:
        """The runtime folder, with the default filled in."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - made 0700, owner checked
        return Path(base) / f"kvbus-{os.getuid()}" / self.agent_id

    @property
    def attach_path(self) -> Path:
        """The socket that engines are told."""
        return self.runtime_path / "attach.sock"

    @property
    def memory_path(self) -> Path:
        """The socket at which a prefill agent lends memory, in its first seat."""
        return self.runtime_path / MEMORY_SOCKET


C = TypeVar("C", bound=AgentConfig)


def load_config(kind: type[C], path: Path) -> C:
    """Read ``path``; raises `ConfigError` that names the file and the key."""
    return convert_config(kind, _read_fields(path), source=str(path))


def load_shared_config(path: Path) -> AgentConfig:
    """The keys of ``path`` that all agents have, of whatever role; the others are not looked at.

    Raises `ConfigError` that names the file and the key.
    """
    shared = {field.encode_name for field in msgspec.structs.fields(AgentConfig)}
    fields = {key: value for key, value in _read_fields(path).items() if key in shared}
    return convert_config(AgentConfig, fields, source=str(path))


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def convert_config(kind: type[C], fields: dict[str, Any], *, source: str) -> C:
    """The typed config of ``fields``; raises `ConfigError` that names ``source`` and the key."""
    try:
        config = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$.")
        where = f"key '{key.rstrip('`')}': " if key else ""
        raise ConfigError(f"{source}: {where}{reason}", key=key.rstrip("`")) from error
    for key in BINDS:
        is_named = bool(config.advertise_host)
        check_address(getattr(config, key), key=key, source=source, is_named=is_named)
    _check_staging(config, source)
    return config


def commented_default(kind: type[AgentConfig], **values: str) -> str:
    """A TOML file with every key, its meaning and its default; ``values`` fill required keys."""
    return "\n".join(_comment_lines(kind, dict(values), prefix="")) + "\n"


def _check_staging(config: AgentConfig, source: str) -> None:
    if 0 < config.staging_bytes < config.slot_bytes:
        raise ConfigError(
            f"{source}: key 'staging_bytes': {config.staging_bytes} is less than one slot of "
            f"'slot_bytes' = {config.slot_bytes}; make it larger, or 0 to turn packing off",
            key="staging_bytes",
        )


def _comment_lines(
    kind: type[msgspec.Struct], values: dict[str, Any], prefix: str
) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=True)
    sections: list[tuple[str, type[msgspec.Struct]]] = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            sections.append((field.name, hint))
            continue
        yield f"# {_description(hint)}"
        yield f"{field.name} = {_toml(values.get(field.name, field.default))}"
        yield ""
    for name, section in sections:
        yield f"[{prefix}{name}]"
        yield from _comment_lines(section, {}, prefix=f"{prefix}{name}.")


def _description(hint: Any) -> str:
    found = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
    return next((text for text in reversed(found) if text), "")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
