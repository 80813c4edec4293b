"""Keys for tests: of agents, routers, observers and strangers, as `kvbus keys` would make them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbus.bus import KeyPair, new_key_pair
from kvbus.keys.files import write_secret
from kvbus.keys.trusted import TrustedKey, revoke_trusted, write_trusted
from kvbus.protocol import Role
from tests.support.agents import AgentProcess, Agents
from tests.support.engines import begin, pair
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
        """The key of that name, made when it is asked for first; nobody trusts it yet."""
        if name not in self.pairs:
            self.pairs[name] = new_key_pair()
            write_secret(self.secret_path(name), self.pairs[name])
        return self.pairs[name]

    def secret_path(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def trust(self, name: str, *roles: Role) -> KeyPair:
        """Trust the key of that name in these roles."""
        pair = self.pair(name)
        write_trusted(self.trusted, TrustedKey(name, pair.public, frozenset(roles)))
        return pair

    def revoke(self, name: str) -> None:
        assert revoke_trusted(self.trusted, name)

    def curve(self, name: str, server: str) -> Curve:
        """What a plain socket needs to speak as ``name`` to the agent with the key ``server``."""
        pair = self.pair(name)
        return Curve(pair.public, pair.secret, self.pair(server).public)

    def settings(self, name: str) -> dict[str, Any]:
        """What an agent with the key of that name has in its config."""
        self.pair(name)
        self.trusted.touch()
        return {"key_file": str(self.secret_path(name)), "authorized_keys": str(self.trusted)}

    def prepare(self, agents: Agents, role: Role, name: str, **settings: Any) -> AgentProcess:
        """An agent that is trusted, and that the tests themselves may ask."""
        if OBSERVER not in self.pairs:
            self.trust(OBSERVER, Role.OBSERVER)
        if name not in self.pairs:
            self.trust(name, role)
        agent: AgentProcess = agents.prepare(role.value, **self.settings(name), **settings)
        agent.curve = self.curve(OBSERVER, name)
        return agent


async def hand_over(prefill: AgentProcess, decode: AgentProcess) -> Any:
    """One handoff; returns its ticket."""
    async with pair(prefill.attach, decode.attach) as engines:
        handoff = await begin(*engines, 32)
        await handoff.completed()
        return handoff.offer.ticket


def envelope(op: str, request_id: int) -> dict[str, Any]:
    """A request of the session of one boot id, without a body."""
    return {"v": 1, "op": op, "id": request_id, "boot": "leaver", "body": {}}
