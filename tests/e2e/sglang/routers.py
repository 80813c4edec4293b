"""SGLang's own routers as real processes before two servers, as they are."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from kvbus.spawn import Child, free_port
from tests.e2e.sglang.servers import SglangServer
from tests.support.agents import wait_until

STARTS_WITHIN_S = 60.0
ROUTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "sglang-router": ("/readiness", ()),
    "mini-lb": ("/health", ("--mini-lb",)),
}
"""Where each says that it can route, and its options."""


@contextmanager
def router_before(
    prefill: SglangServer, decode: SglangServer, bootstrap_port: int, name: str, log: Path
) -> Iterator[int]:
    """Start a router of `ROUTERS`, and end it; its port."""
    port, (ready, options) = free_port(), ROUTERS[name]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    command += ["--prometheus-port", str(free_port())]
    with Child.start(name, command, log=log) as child:
        is_ready = partial(_answers, port, ready)
        wait_until(lambda: is_ready() or not child.is_alive, f"{name}: {log}", STARTS_WITHIN_S)
        assert child.is_alive, child.log_text()
        yield port


def _answers(port: int, path: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
