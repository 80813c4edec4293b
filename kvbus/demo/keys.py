"""The keys of a demo: of its two agents, and of the driver that is their router and observer."""

from pathlib import Path

from kvbus.bus import ClientCurve, KeyPair, new_key_pair
from kvbus.keys.files import write_secret
from kvbus.keys.trusted import TrustedKey, write_trusted
from kvbus.protocol.message import Role

AGENTS = {"prefill": Role.PREFILL, "decode": Role.DECODE}


class DemoKeys:
    """Fresh keys in ``folder``, a private one; all trust each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = self._make("driver", Role.ROUTER, Role.OBSERVER)
        self._agents = {name: self._make(name, role) for name, role in AGENTS.items()}

    def settings(self, role: str) -> dict[str, str]:
        """What the config of an agent says of keys."""
        return {
            "key_file": str(self._folder / f"{role}.key"),
            "authorized_keys": str(self._folder / "trusted"),
        }

    def curve(self, server_key: str) -> ClientCurve:
        """What the driver asks an agent with."""
        return ClientCurve(self._own, server_key)

    def of(self, role: str) -> ClientCurve:
        """What the driver asks the agent of ``role`` with."""
        return self.curve(self._agents[role].public)

    def _make(self, name: str, *roles: Role) -> KeyPair:
        pair = new_key_pair()
        write_secret(self._folder / f"{name}.key", pair)
        trusted = TrustedKey(name, pair.public, frozenset(roles))
        write_trusted(self._folder / "trusted", trusted)
        return pair
