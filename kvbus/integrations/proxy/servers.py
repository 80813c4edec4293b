"""The servers behind the proxy: whose turn it is, and which are healthy.

Refuses to talk to them: `health` and `upstream` do, and say here what they saw.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog

log = structlog.get_logger()

NOT_CHECKED = "not checked yet"


class Role(StrEnum):
    """What a server is there for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Server:
    """One server; ``trouble`` says why it gets no requests, None that it gets them."""

    role: Role
    url: str
    trouble: str | None = NOT_CHECKED

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    def found(self) -> None:
        """It answered as a healthy server does."""
        if self.trouble is not None:
            log.info("server.found", role=self.role, server=self.url)
        self.trouble = None

    def lost(self, trouble: str) -> None:
        """It gets no requests until it is found again."""
        if self.trouble in (None, NOT_CHECKED):
            log.warning("server.lost", role=self.role, server=self.url, trouble=trouble)
        self.trouble = trouble


class ServerPool:
    """The servers of one role, in the order in which they were last chosen."""

    def __init__(self, role: Role, urls: Sequence[str]) -> None:
        self.role = role
        self._named = [Server(role, url) for url in urls]
        self._waiting = list(self._named)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._named)

    @property
    def any_healthy(self) -> bool:
        """Whether a request would find a server."""
        return any(server.trouble is None for server in self._named)

    def in_turn(self) -> Iterator[Server]:
        """The healthy servers, each once, the one that waited longest first."""
        for server in list(self._waiting):
            if server.trouble is None:
                self._waiting.remove(server)
                self._waiting.append(server)
                yield server
