"""The processes of the benchmark: agents, what answers lines, a bare NIXL pair; each ends here.

Each has a session of its own: a Ctrl-C at the terminal is for the benchmark alone, which ends them.
"""

import contextlib
import http.client
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvbus.errors import RequestTimeout
from kvbus.planning import Reads
from kvbus.spawn import Child, free_port, write_agent_config

BARE_PAIR = "kvbus.lab.bare_pair"
LAG_BUCKET = "kvbus_event_loop_lag_seconds_bucket"
READ_WITHIN_S = 120.0


def answering(name: str, module: str, *arguments: str, folder: Path) -> Child:
    """Run ``python -m module`` with pipes for its stdin and stdout; it ends with its stdin."""
    return Child.start(
        name,
        [sys.executable, "-m", module, *arguments],
        log=folder / f"{name}.log",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        own_session=True,
    )


def tell(child: Child, what: bytes) -> None:
    """Write to a child's stdin; raises `PeerLost` when it ended."""
    try:
        if child.process.stdin is not None:
            child.process.stdin.write(what)
            child.process.stdin.flush()
    except OSError as error:
        raise child.lost() from error


def hear(child: Child) -> bytes:
    """The next line of a child; raises `PeerLost` when it ended."""
    line = child.process.stdout.readline() if child.process.stdout is not None else b""
    if not line:
        raise child.lost("closed its output")
    return line


@dataclass(frozen=True, slots=True)
class BenchAgent:
    """One agent process with the default configuration."""

    child: Child
    attach_path: Path
    metrics_port: int

    def lag_counts(self) -> dict[float, float]:
        """Its histogram of event loop lag: cumulative counts by upper bound in seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        return {
            float(sample.labels["le"]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == LAG_BUCKET
        }


@contextlib.contextmanager
def agent(
    role: str,
    folder: Path,
    *,
    label: str = "default",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[BenchAgent]:
    """Start the ``role`` agent below ``folder``; ``settings`` are keys of its configuration.

    Each of a role has a ``label`` of its own.
    """
    port, name = free_port(), f"{role}-{label}"
    page = {"http_bind": f"127.0.0.1:{port}"}
    config = write_agent_config(name, folder, **page, **settings)
    command, log = [sys.executable, "-m", f"kvbus_{role}", str(config)], folder / f"{name}.log"
    with Child.start(f"{role} agent", command, log=log, own_session=True) as child:
        yield BenchAgent(child, folder / name / "attach.sock", port)


@dataclass(frozen=True, slots=True)
class BarePair:
    """The baseline: bare NIXL between two processes that sleep unless they are asked."""

    target: Child
    reader: Child

    async def read_s(self, command: bytes = b"read") -> float:
        """Seconds of one READ; of ``verify`` too, which fails for wrong bytes."""
        tell(self.target, b"d")
        try:
            tell(self.reader, command + b"\n")
            with anyio.move_on_after(READ_WITHIN_S):
                heard = await anyio.to_thread.run_sync(hear, self.reader, abandon_on_cancel=True)
                return float(heard)
        finally:
            tell(self.target, b"r")
        raise RequestTimeout(f"no bare READ within {READ_WITHIN_S:g} s")


@contextlib.contextmanager
def bare_pair(rows: Reads, size_bytes: int, folder: Path) -> Iterator[BarePair]:
    """Start both processes, with memory of ``size_bytes`` each; ``rows`` are offsets into it."""
    path, size = folder / "rows.npz", str(size_bytes)
    np.savez(path, local=rows.local, remote=rows.remote)
    with (
        answering("bare target", BARE_PAIR, "target", size, folder=folder) as target,
        answering("bare reader", BARE_PAIR, "reader", size, str(path), folder=folder) as reader,
    ):
        tell(reader, hear(target))
        yield BarePair(target, reader)
