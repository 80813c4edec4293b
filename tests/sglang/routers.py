"""SGLang's own routers as real processes before two servers, as they are."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from kvbus.spawn import Child, free_port
from tests.agents import wait_until
from tests.sglang.servers import SglangServer

STARTS_WITHIN_S = 60.0
ROUTERS: Mapping[str, Sequence[str]] = {
    "sglang-router": ("--disable-health-check",),
    "mini-lb": ("--mini-lb",),
}


@contextmanager
def router_before(
    prefill: SglangServer, decode: SglangServer, bootstrap_port: int, name: str, log: Path
) -> Iterator[int]:
    """Start a router of `ROUTERS`, and end it; its port."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url]
    command += ["--host", "127.0.0.1", "--port", str(port), *ROUTERS[name]]
    command += ["--prometheus-port", str(free_port())]
    with Child.start(name, command, log=log) as child:
        wait_until(lambda: _answers(port) or not child.is_alive, f"{name}: {log}", STARTS_WITHIN_S)
        assert child.is_alive, child.log_text()
        yield port


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
