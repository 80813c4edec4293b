"""Who may connect to an agent and what it may ask there; whom the agent itself connects to."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.config import AgentConfig, bind_host, http_address, named
from kvbus.agent.data_plane import is_loopback
from kvbus.agent.observe import AgentMetrics, LimitedLog
from kvbus.bus import (
    Applicant,
    BusContext,
    Call,
    ClientCurve,
    EventPublisher,
    KeyCheck,
    KeyPair,
    RequestServer,
    ServerCurve,
    SocketOptions,
)
from kvbus.errors import ConfigError, ErrorCode, KVBusError, RemoteError
from kvbus.keys.files import read_private, read_secret
from kvbus.keys.trusted import TrustedKeys
from kvbus.protocol.message import Role, may_ask, may_hear
from kvbus.protocol.ticket import TicketKeys

log = structlog.get_logger()

PEER, EVENTS = "peer", "events"
LOOK_S = 0.4
"""How often the folder of keys is looked at; each file of it every other time."""
KEYS_READINGS = {
    "trusted_keys": "Public keys that are trusted now.",
    "refused_keys": "Handshakes of keys that were turned away.",
}

OnChange = Callable[[frozenset[str]], None]
"""Told the keys that have lost a role, or all of them."""


class Access:
    """The keys of an agent, and the gate that they are.

    ``on_change`` are called when keys that were trusted are less so.
    """

    def __init__(self, keys: KeyPair | None = None, trusted: TrustedKeys | None = None) -> None:
        self.keys, self._trusted = keys, trusted
        self.on_change: list[OnChange] = []
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._num_refused = 0
        self._lines: LimitedLog | None = None
        self._our_roles: frozenset[str] = frozenset(self.roles_of(self.server_key))

    @classmethod
    def open(cls, config: AgentConfig) -> "Access":
        """What the config says; raises `ConfigError`, also for what would be open to a network."""
        if bool(config.key_file) != bool(config.authorized_keys):
            missing = "key_file" if config.authorized_keys else "authorized_keys"
            raise ConfigError(
                f"key '{missing}': needed, as keys are on with key_file and authorized_keys both",
                key=missing,
            )
        if not config.key_file:
            _require_loopback(config)
            return cls()
        trusted = TrustedKeys(Path(config.authorized_keys))
        trusted.refresh()
        if trusted.problems:
            raise ConfigError(f"key 'authorized_keys': {trusted.problems[0]}")
        try:
            return cls(read_secret(Path(config.key_file)), trusted)
        except ConfigError as error:
            raise ConfigError(f"key 'key_file': {error.message}", key="key_file") from error

    @property
    def server_key(self) -> str:
        """What others must know of this agent to connect; empty without keys."""
        return self.keys.public if self.keys else ""

    def readings(self) -> dict[str, float]:
        """The readings named in `KEYS_READINGS`."""
        num_trusted = len(list(self._trusted)) if self._trusted else 0
        return {"trusted_keys": num_trusted, "refused_keys": self._num_refused}

    def start(self, context: BusContext, tasks: TaskGroup) -> None:
        """Check keys, before the first socket is bound."""
        if self.keys is not None:
            self._lines = LimitedLog()
            tasks.start_soon(KeyCheck(context, self._admit).run)

    def guard(
        self,
        peer: RequestServer,
        events: EventPublisher,
        *,
        metrics: AgentMetrics,
        tasks: TaskGroup,
    ) -> None:
        """Who is trusted no more loses its sessions, and whoever hears events connects again."""
        metrics.add_readings(self.readings, KEYS_READINGS)

        def end(lost: frozenset[str]) -> None:
            for key in lost:
                peer.end_key(key)
            events.hang_up()

        if self.keys is not None:
            self.on_change.append(end)
            tasks.start_soon(self._watch)

    def peer_options(self) -> SocketOptions:
        """The options of the peer socket."""
        return self._bound(PEER)

    def events_options(self) -> SocketOptions:
        """The options of the events socket."""
        return self._bound(EVENTS)

    def connected(self, endpoint: str, server_key: str, role: Role) -> SocketOptions:
        """The options of a socket that connects to an agent.

        Raises `RemoteError` (``forbidden``) unless its key is trusted with this role.
        """
        if self.keys is None:
            return SocketOptions()
        self.require_trusted(endpoint, server_key, role)
        return SocketOptions(curve=ClientCurve(self.keys, server_key))

    def require_trusted(self, endpoint: str, server_key: str, role: Role) -> None:
        """Raise `RemoteError` (``forbidden``) unless an agent may be spoken with; needs keys."""
        if self._trusted is None or role in self._trusted.roles_of(server_key):
            return
        shown = f"its key {server_key} is" if server_key else "it has no key, so that it is"
        raise RemoteError(
            f"the {role} agent at {endpoint} is not connected to: {shown} not trusted here with "
            f"the role '{role}'",
            code=ErrorCode.FORBIDDEN,
            endpoint=endpoint,
        )

    def roles_of(self, key: str) -> tuple[str, ...]:
        """What a key is trusted as; nothing without keys."""
        return tuple(sorted(self._trusted.roles_of(key))) if self._trusted else ()

    def has_lost(self, role: Role) -> bool:
        """Whether the folder does not have our own key with this role, but had it, or has others.

        A folder that only says whom we trust need not have it.
        """
        if self._trusted is None or role in self.roles_of(self.server_key):
            return False
        return role in self._our_roles or any(role in one.roles for one in self._trusted)

    def gate(self, call: Call) -> None:
        """Raise `KVBusError` (``forbidden``) unless the key of the caller may ask this."""
        if self._trusted is None:
            return
        key = call.session.sender.key
        roles = self._trusted.roles_of(key)
        if not may_ask(roles, call.op):
            trusted_as = " and ".join(sorted(roles)) or "nothing any more"
            raise KVBusError(
                f"'{call.op}' is not for a key that is trusted as {trusted_as}",
                code=ErrorCode.FORBIDDEN,
            )

    def _bound(self, domain: str) -> SocketOptions:
        return SocketOptions(curve=ServerCurve(self.keys, domain) if self.keys else None)

    async def _watch(self) -> None:
        """Look at the folder again and again; who lost a role is told to ``on_change``."""
        while True:
            for files in (False, True):
                await anyio.sleep(LOOK_S)
                await self.look(files=files)

    async def _admit(self, applicant: Applicant) -> bool:
        if self._trusted is None or self._lines is None:
            return False
        await self.look(files=False)
        roles = self._trusted.roles_of(applicant.key)
        if (applicant.domain == PEER and roles) or (applicant.domain == EVENTS and may_hear(roles)):
            return True
        self._num_refused += 1
        self._lines.warning(
            "key.refused",
            who=applicant.address,
            key=applicant.key,
            name=self._trusted.name_of(applicant.key),
            address=applicant.address,
            socket=applicant.domain,
        )
        return False

    async def look(self, *, files: bool = True) -> None:
        """Read the trusted keys again if they have changed, in a thread; see `TrustedKeys`."""
        trusted = self._trusted
        if trusted is None:
            return
        lost = await anyio.to_thread.run_sync(
            partial(trusted.lost, files=files),
            limiter=self._one_at_a_time,
            abandon_on_cancel=True,
        )
        if lost is None:
            return
        self._our_roles |= frozenset(self.roles_of(self.server_key))
        log.info("keys.changed", num_keys=len(list(trusted)), num_lost=len(lost))
        for problem in trusted.problems:
            log.error("key.unreadable", reason=problem)
        if lost:
            for call in self.on_change:
                call(lost)


def _require_loopback(config: AgentConfig) -> None:
    for key in ("peer_bind", "events_bind"):
        if not config.insecure and not is_loopback(bind_host(getattr(config, key))):
            raise ConfigError(
                f"key 'key_file': needed, because {key} is not loopback: other machines reach the "
                "agent. Make keys with 'kvbus keys' (docs/security.md), or write insecure = true "
                "if nobody but the cluster can reach its network",
                key="key_file",
            )


MIN_KEY_BYTES = 32
TOKEN = re.compile(r"[ -~]{16,1024}")


def load_ticket_keys(paths: Sequence[str]) -> TicketKeys | None:
    """The keys in ``paths``, in that order; None when there are none."""
    keys = []
    with named("ticket_keys"):
        for path in paths:
            key = read_private(Path(path)).strip()
            if len(key) < MIN_KEY_BYTES:
                raise ConfigError(
                    f"{path} has a key of {len(key)} bytes; {MIN_KEY_BYTES} at least are needed, "
                    f"such as from: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
                )
            keys.append(key)
    return TicketKeys(keys) if keys else None


def load_http_token(config: AgentConfig) -> str:
    """What requests at ``http_bind`` have to show; empty when this machine alone may ask.

    Raises `ConfigError`, also for what would be open to a network.
    """
    path, host = config.http_token_file, http_address(config.http_bind or "localhost:0")[0]
    with named("http_token_file"):
        if path:
            token = read_private(Path(path)).decode(errors="replace").strip()
            if not TOKEN.fullmatch(token):
                raise ConfigError(
                    f"{path} has no token: one line of 16 to 1024 printable characters"
                )
            return token
        if not is_loopback(host) and not config.insecure:
            raise ConfigError(
                f'needed, because http_bind = "{config.http_bind}" is not loopback: other machines '
                "reach it. Write a token into a file of mode 0600, such as by 'openssl rand -hex "
                "32', or write insecure = true"
            )
    return ""
