"""The servers behind the proxy: which of them are healthy, and whose turn it is."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import anyio
import httpx
import structlog

log = structlog.get_logger()

NOT_CHECKED = "not checked yet"


@dataclass(eq=False)
class Server:
    """One server; ``trouble`` says why it gets no requests, None that it gets them."""

    role: str
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

    def __init__(self, role: str, urls: Sequence[str]) -> None:
        self.role = role
        self.servers = [Server(role, url) for url in urls]
        self._waiting = list(self.servers)

    @property
    def any_healthy(self) -> bool:
        """Whether a request would find a server."""
        return any(server.trouble is None for server in self.servers)

    @property
    def next_one(self) -> Server | None:
        """The healthy server that waited longest, which waits on."""
        return next((server for server in self._waiting if server.trouble is None), None)

    def in_turn(self) -> Iterator[Server]:
        """The healthy servers, each once, the one that waited longest first."""
        for server in list(self._waiting):
            if server.trouble is None:
                self._waiting.remove(server)
                self._waiting.append(server)
                yield server


async def check_health(client: httpx.AsyncClient, servers: Iterable[Server]) -> None:
    """Ask each server once, all at the same time: 200 in time is healthy, anything else is not."""
    async with anyio.create_task_group() as tasks:
        for server in servers:
            tasks.start_soon(_check, client, server)


async def _check(client: httpx.AsyncClient, server: Server) -> None:
    try:
        response = await client.get(f"{server.url}/health")
    except httpx.RequestError as error:
        server.lost(f"/health: {str(error) or type(error).__name__}")
        return
    if response.status_code == httpx.codes.OK:
        server.found()
    else:
        server.lost(f"/health answered {response.status_code}")
