"""Trusted keys and their rights at an agent."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.config import AgentConfig, bind_host, http_address, named
from kvbus.agent.data_plane import is_loopback
from kvbus.agent.loop import guarded
from kvbus.agent.observe import AgentMetrics, LimitedLog
from kvbus.bus import (
    BusContext,
    Call,
    ClientCurve,
    KeyPair,
    ServerCurve,
    SocketOptions,
    ZapHandler,
    ZapRequest,
)
from kvbus.errors import ConfigError, ErrorCode, KVBusError, RemoteError, docs_url
from kvbus.keys.files import read_private, read_secret
from kvbus.keys.trusted import TrustedKeys
from kvbus.protocol.message import Role, may_request, may_subscribe
from kvbus.protocol.ticket import TicketKeys

log = structlog.get_logger()

PEER, EVENTS = "peer", "events"
CHECK_S = 0.4
KEYS_READINGS = {
    "trusted_keys": "Trusted public keys.",
    "refused_keys": "Rejected handshakes of keys.",
}

OnChange = Callable[[frozenset[str]], None]


class Access:
    """CURVE keys and the check of each request; without keys, all is permitted."""

    def __init__(self, keys: KeyPair | None = None, trusted: TrustedKeys | None = None) -> None:
        self.keys, self._trusted = keys, trusted
        self.on_change: list[OnChange] = []
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._num_refused = 0
        self._our_roles: frozenset[str] = frozenset(self.roles_of(self.server_key))

    @classmethod
    def open(cls, config: AgentConfig) -> "Access":
        """Raise `ConfigError`, also if other machines reach an agent without keys."""
        if config.key_file and config.authorized_keys:
            trusted = TrustedKeys(Path(config.authorized_keys))
            with named("authorized_keys"):
                if trusted.problems:
                    raise ConfigError(trusted.problems[0])
            with named("key_file"):
                return cls(read_secret(Path(config.key_file)), trusted)
        for key, other in (("key_file", "authorized_keys"), ("authorized_keys", "key_file")):
            with named(key):
                if getattr(config, other):
                    raise ConfigError(f"needed, as keys are on with {key} and {other} both")
        for key in ("peer_bind", "events_bind"):
            with named("key_file"):
                if not config.insecure and not is_loopback(bind_host(getattr(config, key))):
                    raise ConfigError(
                        f"needed, because {key} is not loopback: other machines reach the agent. "
                        f"Make keys with 'kvbus keys' ({docs_url('security')}), or write "
                        "insecure = true if only the cluster can reach its network"
                    )
        return cls()

    @property
    def server_key(self) -> str:
        return self.keys.public if self.keys else ""

    def start(self, context: BusContext, tasks: TaskGroup, metrics: AgentMetrics) -> None:
        """Call it before the first socket is bound."""
        metrics.add_readings(self._readings, KEYS_READINGS)
        if self.keys is not None:
            tasks.start_soon(ZapHandler(context, partial(self._admit, LimitedLog())).run)
            tasks.start_soon(self._watch)

    def options(self, domain: str) -> SocketOptions:
        return SocketOptions(curve=ServerCurve(self.keys, domain) if self.keys else None)

    def connected(self, endpoint: str, server_key: str, role: Role) -> SocketOptions:
        """Raise `RemoteError` unless ``server_key`` is trusted with this role."""
        if self.keys is None or self._trusted is None:
            return SocketOptions()
        if role not in self._trusted.roles_of(server_key):
            shown = f"its key {server_key} is" if server_key else "it has no key, so that it is"
            raise RemoteError(
                f"the {role} agent at {endpoint} is not connected to: {shown} not trusted here "
                f"with the role '{role}'",
                code=ErrorCode.FORBIDDEN,
                endpoint=endpoint,
            )
        return SocketOptions(curve=ClientCurve(self.keys, server_key))

    def roles_of(self, key: str) -> tuple[str, ...]:
        return tuple(sorted(self._trusted.roles_of(key))) if self._trusted else ()

    def has_lost(self, role: Role) -> bool:
        """Return whether our own key lacks this role in the file of trusted keys.

        The file may list only our peers: then no key has our role.
        """
        if self._trusted is None or role in self.roles_of(self.server_key):
            return False
        return role in self._our_roles or any(role in one.roles for one in self._trusted)

    def gate(self, call: Call) -> None:
        if self._trusted is None:
            return
        roles = self._trusted.roles_of(call.session.key)
        if not may_request(roles, call.op):
            trusted_as = " and ".join(sorted(roles)) or "nothing any more"
            raise KVBusError(
                f"'{call.op}' is not for a key that is trusted as {trusted_as}",
                code=ErrorCode.FORBIDDEN,
            )

    def _readings(self) -> dict[str, float]:
        num_trusted = len(list(self._trusted)) if self._trusted else 0
        return {"trusted_keys": num_trusted, "refused_keys": self._num_refused}

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(CHECK_S)
            # The next check repeats one that fails, for example without a free thread.
            await guarded(self._check_files, lambda _: None)

    async def _admit(self, lines: LimitedLog, applicant: ZapRequest) -> bool:
        if self._trusted is None:
            return False
        await self._check_files()
        roles = self._trusted.roles_of(applicant.key)
        if may_subscribe(roles) if applicant.domain == EVENTS else roles:
            return True
        self._num_refused += 1
        lines.write(
            "key.refused",
            level="warning",
            key=applicant.key,
            name=self._trusted.name_of(applicant.key),
            address=applicant.address,
            socket=applicant.domain,
        )
        return False

    async def _check_files(self) -> None:
        trusted = self._trusted
        if trusted is None:
            return
        lost = await anyio.to_thread.run_sync(
            trusted.refresh, limiter=self._one_at_a_time, abandon_on_cancel=True
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


MIN_KEY_BYTES = 32
TOKEN = re.compile(r"[ -~]{16,1024}")


def load_ticket_keys(paths: Sequence[str]) -> TicketKeys | None:
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
    """Raise `ConfigError`, also if other machines reach a port without a token or ``insecure``."""
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
