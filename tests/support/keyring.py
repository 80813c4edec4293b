"""Keys for tests: of agents, routers, observers and strangers, as `kvbus keys` would make them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbus.bus import KeyPair, new_key_pair
from kvbus.keys.files import write_secret
from kvbus.keys.trusted import TrustedKey, revoke_trusted, write_trusted
from kvbus.protocol import Role
from tests.support.agents import AgentProcess, Agents
from tests.support.plain_sockets import Curve

OBSERVER = "observer"


@dataclass
class KeyRing:
    """Secret keys by name, and one file of trusted keys that all agents read."""

    folder: Path
    pairs: dict[str, KeyPair] = field(default_factory=dict)

    @property
    def trusted(self) -> Path:
        return self.folder / "authorized"

    def pair(self, name: str) -> KeyPair:
        if name not in self.pairs:
            self.pairs[name] = new_key_pair()
            write_secret(self.secret_path(name), self.pairs[name])
        return self.pairs[name]

    def secret_path(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def trust(self, name: str, *roles: Role) -> KeyPair:
        pair = self.pair(name)
        write_trusted(self.trusted, TrustedKey(name, pair.public, frozenset(roles)))
        return pair

    def revoke(self, name: str) -> None:
        assert revoke_trusted(self.trusted, name)

    def curve(self, name: str, server: str) -> Curve:
        pair = self.pair(name)
        return Curve(pair.public, pair.secret, self.pair(server).public)

    def settings(self, name: str) -> dict[str, Any]:
        self.pair(name)
        self.trusted.touch()
        return {"key_file": str(self.secret_path(name)), "authorized_keys": str(self.trusted)}

    def prepare(self, agents: Agents, role: Role, name: str, **settings: Any) -> AgentProcess:
        if OBSERVER not in self.pairs:
            self.trust(OBSERVER, Role.OBSERVER)
        if name not in self.pairs:
            self.trust(name, role)
        agent: AgentProcess = agents.prepare(role.value, **self.settings(name), **settings)
        agent.curve = self.curve(OBSERVER, name)
        return agent
