"""The proxy as a real process before two servers.

Refuses to know what it does inside: a test sees its answers, its health and its log.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvbus.spawn import Child, free_port
from tests.agents import wait_until
from tests.vllm.calls import Call, ask
from tests.vllm.clusters import Cluster

STARTS_WITHIN_S = 60.0
ANSWERS_WITHIN_S = 30.0


@dataclass(frozen=True)
class ProxyProcess:
    """One proxy that runs."""

    port: int
    log_path: Path

    def begin(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Call:
        """Send a client's request."""
        return ask(self.port, prompt, num_tokens, **fields)

    def healthy(self) -> bool:
        """Whether it says that it has a server of each kind."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ANSWERS_WITHIN_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def proxy_before(pair: Cluster) -> Iterator[ProxyProcess]:
    """Start a proxy before both servers of ``pair``, and end it."""
    proxy = ProxyProcess(free_port(), pair.decode.folder / "proxy.log")
    options = ["--port", str(proxy.port)]
    options += ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    command = [sys.executable, "-m", "kvbus.integrations.proxy", *options]
    with Child.start("proxy", command, log=proxy.log_path) as child:
        wait_until(
            lambda: proxy.healthy() or not child.is_alive,
            f"healthy: {proxy.log_path}",
            STARTS_WITHIN_S,
        )
        assert child.is_alive, proxy.log_path.read_text()
        yield proxy
