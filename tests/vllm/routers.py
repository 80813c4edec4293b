"""Routers of others, as they are on PyPI, as real processes before two servers.

Refuses to change them, or to look inside: a test sees what they answer to a client.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvbus.spawn import Child, free_port
from tests.agents import wait_until
from tests.vllm.clusters import Cluster
from tests.vllm.servers import VllmServer

STARTS_WITHIN_S = 120.0
ANSWERS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Router:
    """One router: its command before two servers, what is told to it, and when it is ready."""

    command: Callable[[Cluster, int], list[str]]
    introduce: Callable[[Cluster, int], None]
    ready: Callable[[int], bool]


def is_there(name: str) -> bool:
    """Whether the router's command is installed beside this Python."""
    return _command(name) is not None


@contextmanager
def router_before(pair: Cluster, name: str) -> Iterator[int]:
    """Start a router before both servers of ``pair``, and end it; its port."""
    router, port = ROUTERS[name], free_port()
    log = pair.decode.folder / f"{name}.log"
    command = [_command(name) or name, *router.command(pair, port)]
    with Child.start(name, command, log=log) as child:

        def wait(until: Callable[[int], bool], what: str) -> None:
            done = f"{name} {what}: {log}"
            wait_until(lambda: until(port) or not child.is_alive, done, STARTS_WITHIN_S)
            assert child.is_alive, log.read_text(errors="replace")

        wait(lambda port: _status(port, "/health") is not None, "answers")
        router.introduce(pair, port)
        wait(router.ready, "is ready")
        yield port


def _vllm_router(pair: Cluster, port: int) -> list[str]:
    servers = ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return ["--vllm-pd-disaggregation", *servers, *own]


def _smg(_: Cluster, port: int) -> list[str]:
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return ["launch", "--pd-disaggregation", "--prometheus-host", "127.0.0.1", *own]


def _tell_smg(pair: Cluster, port: int) -> None:
    """On the command line servers have no connector, and without one it asks for no handoff."""
    _add_worker(port, "prefill", pair.prefill)
    _add_worker(port, "decode", pair.decode)


def _add_worker(port: int, kind: str, server: VllmServer) -> None:
    worker = {"url": server.url, "worker_type": kind, "runtime_type": "vllm"}
    spec = {**worker, "kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert _asked(port, "POST", "/workers", spec)["status"] == "accepted"


def _smg_ready(port: int) -> bool:
    workers = _asked(port, "GET", "/workers")["workers"]
    return [worker["status"] for worker in workers] == ["ready", "ready"]


def _asked(port: int, method: str, path: str, body: object = None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def _healthy(port: int) -> bool:
    return _status(port, "/health") == 200


def _status(port: int, path: str) -> int | None:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _command(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent))


ROUTERS: Mapping[str, Router] = {
    "vllm-router": Router(_vllm_router, lambda *_: None, _healthy),
    "smg": Router(_smg, _tell_smg, _smg_ready),
}
