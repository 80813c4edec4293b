"""Four hosts on one Ethernet, an agent on each, with keys and over TCP only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbus.protocol import Role
from tests.process.faults.conftest import DECODE, PREFILL, SLOW_READS
from tests.support.agents import AgentProcess, Agents, agents_ended
from tests.support.keyring import KeyRing
from tests.support.namespaces import BRIDGED, HAVE_NAMESPACES, Host, bridged

PREFILL_HOSTS, DECODE_HOSTS = ("p0", "p1"), ("d0", "d1")
SOON = {"lease_s": 2.0, "request_timeout_s": 2.0, "quarantine_timeout_s": 1.0}
"""TCP waits for a cut connection as long again as it was cut."""
SETTINGS = {
    Role.PREFILL: {**PREFILL, **SLOW_READS, "mapped": False},
    Role.DECODE: {**DECODE, **SLOW_READS, **SOON},
}


class Network(Agents):
    """The hosts by name, and the agent of each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ring = KeyRing(folder)
        self.hosts: dict[str, Host] = {}
        self.at: dict[str, AgentProcess] = {}

    @property
    def prefill(self) -> list[AgentProcess]:
        return [self.at[name] for name in PREFILL_HOSTS]

    @property
    def decode(self) -> list[AgentProcess]:
        return [self.at[name] for name in DECODE_HOSTS]

    def _token(self) -> Path:
        path = self.folder / "token"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text("a-token-of-some-length")
        return path

    def place(self, role: Role, name: str) -> AgentProcess:
        agent = self.at[name] = self.prepare_at(role, name)
        return agent

    def prepare_at(
        self, role: Role, name: str, *, first_port: int = 7701, **settings: Any
    ) -> AgentProcess:
        host = self.hosts[name]
        binds = {
            "peer_bind": f"tcp://{host.address}:{first_port}",
            "events_bind": f"tcp://{host.address}:{first_port + 1}",
            "http_bind": f"{host.address}:{first_port + 2}",
            "http_token_file": str(self._token()),
            "data_interfaces": [BRIDGED],
        }
        agent = self.ring.prepare(self, role, name, **{**SETTINGS[role], **binds, **settings})
        agent.runner = host.command
        return agent


@pytest.fixture(scope="package")
def shared_network() -> Iterator[Network]:
    if not HAVE_NAMESPACES:
        pytest.skip("needs root and iproute2")
    with bridged(*PREFILL_HOSTS, *DECODE_HOSTS) as hosts, agents_ended(Network) as network:
        network.hosts = hosts
        for role, names in ((Role.PREFILL, PREFILL_HOSTS), (Role.DECODE, DECODE_HOSTS)):
            for name in names:
                network.place(role, name)
        network.start(*network.all)
        yield network


@pytest.fixture
def network(shared_network: Network) -> Iterator[Network]:
    yield shared_network
    shared_network.check()
