"""The prefill agents that the configuration lists: in it, in a file, behind names.

Refuses a line that is none; the others of the file count. A name that cannot be resolved, or a file
that cannot be read, leaves what was known.
"""

import re
from pathlib import Path
from typing import NamedTuple

import anyio
import structlog

from kvbus.bus import look_up_all
from kvbus_decode.config import LISTING, DecodeConfig
from kvbus_decode.peer.directory import PeerAddress

log = structlog.get_logger()

LOOK_UP_WITHIN_S = 5.0
MAX_FILE_BYTES = 1 << 20


class _Line(NamedTuple):
    """What is listed on one line."""

    host: str
    port: str
    key: str

    @classmethod
    def of(cls, text: str) -> "_Line":
        endpoint, _, key = text.partition(" ")
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return cls(host, port, key)


class ListedPeers:
    """Looks them up, again and again; what is wrong is said once, until it is something else."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._lines: list[str] = []
        self._stamp: tuple[int, int, int] | None = None
        self._addresses: dict[str, list[str]] = {}
        """Of each name, what it was last resolved to."""
        self._problems: dict[str, str] = {}
        self._lookups = anyio.CapacityLimiter(4)
        self._chosen: set[PeerAddress] = set()

    @property
    def any(self) -> bool:
        """Whether the configuration lists some, or may."""
        return bool(self._config.peers or self._config.peers_file)

    async def look(self) -> set[PeerAddress]:
        """All that are listed now, by their addresses.

        At most ``max_peers`` of them; those that were among them before come first.
        """
        if self._config.peers_file:
            await anyio.to_thread.run_sync(self._read, Path(self._config.peers_file))
        lines = [_Line.of(text) for text in (*self._config.peers, *self._lines)]
        await self._look_up({line.host for line in lines})
        found = dict.fromkeys(
            PeerAddress(f"tcp://{address}:{line.port}", line.key)
            for line in lines
            for address in self._addresses[line.host]
        )
        most = self._config.max_peers
        crowded = f"{len(found)} agents are listed, {most} are the most (max_peers)"
        self._tell("max_peers", crowded if len(found) > most else "")
        self._chosen = set(sorted(found, key=lambda one: one not in self._chosen)[:most])
        return self._chosen

    def _read(self, path: Path) -> None:
        """Its lines, if it has changed."""
        try:
            status = path.stat()
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if stamp == self._stamp:
                return
            if status.st_size > MAX_FILE_BYTES:
                raise OSError(0, f"it is larger than {MAX_FILE_BYTES} bytes")
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            self._tell(str(path), error.strerror or str(error))
            return
        self._stamp = stamp
        wanted = [" ".join(line.split()) for line in lines]
        wanted = [line for line in wanted if line and not line.startswith("#")]
        self._lines = [line for line in wanted if re.fullmatch(LISTING, line)]
        wrong = next((line for line in wanted if line not in self._lines), "")
        self._tell(str(path), f"'{wrong}' is not tcp://HOST:PORT or with a KEY" if wrong else "")

    async def _look_up(self, hosts: set[str]) -> None:
        """Those of before that are still listed keep what they had, should that fail."""
        for host in self._addresses.keys() - hosts:
            self._problems.pop(host, None)
        self._addresses = {host: self._addresses.get(host, []) for host in hosts}
        async with anyio.create_task_group() as tasks:
            for host in hosts:
                tasks.start_soon(self._look_up_one, host)

    async def _look_up_one(self, host: str) -> None:
        try:
            with anyio.fail_after(LOOK_UP_WITHIN_S):
                self._addresses[host] = await anyio.to_thread.run_sync(
                    look_up_all, host, abandon_on_cancel=True, limiter=self._lookups
                )
            self._tell(host, "")
        except TimeoutError:
            self._tell(host, f"the name server says nothing within {LOOK_UP_WITHIN_S:g} s")
        except (OSError, UnicodeError) as error:
            self._tell(host, getattr(error, "strerror", None) or "it is not a host name")

    def _tell(self, what: str, problem: str) -> None:
        if problem and self._problems.get(what) != problem:
            log.warning("peers.unknown", listed=what, reason=problem)
        self._problems[what] = problem
