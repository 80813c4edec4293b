"""The two agents under measurement: real processes with the default configuration.

Refuses to look inside them: what they tell comes from their metrics page and from /proc.
"""

import contextlib
import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvbus.bench.processes import cpu_s, free_port, run_first, running

LAG = "kvbus_event_loop_lag_seconds"
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class BenchAgent:
    """One agent process."""

    role: str
    pid: int
    attach_path: Path
    metrics_port: int
    log: Path

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return cpu_s(self.pid)

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
            if sample.name == f"{LAG}_bucket"
        }

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


@contextlib.contextmanager
def agent(role: str, folder: Path, *, path: str = "", first: bool = False) -> Iterator[BenchAgent]:
    """Start the ``role`` agent below ``folder``; engines wait until it listens.

    A decode agent reads by ``path``, if that is given. With ``first`` it runs before what
    spins, see `run_first`.
    """
    port, name = free_port(), f"{role}-{path or 'auto'}"
    runtime, log = folder / name, folder / f"{name}.log"
    config = folder / f"{name}.toml"
    config.write_text(
        (f'path = "{path}"\n' if path else "") + f'agent_id = "{name}-bench"\n'
        'peer_bind = "tcp://127.0.0.1:0"\n'
        'events_bind = "tcp://127.0.0.1:0"\n'
        f'runtime_dir = "{runtime}"\n'
        f'metrics_bind = "127.0.0.1:{port}"\n',
        encoding="utf-8",
    )
    with running(f"kvbus_{role}", str(config), log=log) as process:
        if first:
            run_first(process.pid)
        yield BenchAgent(role, process.pid, runtime / "attach.sock", port, log)
