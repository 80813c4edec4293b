"""Agents under attack: a pair without keys, and one with all security settings."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvbus.protocol import Role, Ticket, TicketKeys
from tests.support.agents import AgentProcess, Agents, agents_ended, started
from tests.support.keyring import KeyRing
from tests.unit.bus.conftest import bus, context, endpoint, hold

__all__ = ["bus", "context", "endpoint", "hold"]

TICKET_KEY, OLD_TICKET_KEY = b"k" * 32, b"o" * 44


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    with started("prefill", "decode", log_level="debug") as agents:
        yield agents


@pytest.fixture(scope="package")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keys"))


def ticket_key_file(folder: Path, key: bytes) -> str:
    path = folder / f"{key[:1].decode()}.tickets"
    path.write_bytes(key + b"\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="package")
def shared_site(ring: KeyRing) -> Iterator[Agents]:
    """A prefill and a decode agent with keys; there is a key of each role beside theirs.

    The prefill agent still signs tickets with the old key, the decode agent knows both.
    """
    new, old = (ticket_key_file(ring.folder, key) for key in (TICKET_KEY, OLD_TICKET_KEY))
    with agents_ended(Agents) as agents:
        ring.prepare(agents, Role.PREFILL, "prefill", ticket_keys=[old])
        reads = {"ticket_keys": [new, old], "allowed_peers": ["127.0.0.1"]}
        ring.prepare(agents, Role.DECODE, "decode", **reads)
        for role in Role:
            ring.trust(f"any-{role}", role)
        agents.start(*agents.all)
        yield agents


@pytest.fixture
def site(shared_site: Agents) -> Iterator[list[AgentProcess]]:
    yield shared_site.all
    shared_site.check()


@contextmanager
def trap_at(host: str) -> Iterator[str]:
    with socket.create_server((host, 0)) as listening:
        yield f"tcp://{host}:{listening.getsockname()[1]}"
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.fixture
def trap() -> Iterator[str]:
    with trap_at("127.0.0.1") as endpoint:
        yield endpoint


def signed(ticket: Ticket, *, ago_s: float = 0.0, **changes: Any) -> Ticket:
    changed = structs.replace(ticket, **changes)
    return TicketKeys([TICKET_KEY]).sign(changed, now_s=time.time() - ago_s, lifetime_s=600)
