"""Routers as real processes before two servers: kvbus' proxy, and those of others as they are.

A test sees what they answer to a client.
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
from tests.vllm.servers import VllmServer

STARTS_WITHIN_S = 120.0
ANSWERS_WITHIN_S = 10.0
LOOPBACK = ("--host", "127.0.0.1")


@dataclass(frozen=True)
class Router:
    """One router: its command, what is told to it of two servers, and when it is ready."""

    command: Callable[[str, str, int], list[str]]
    introduce: Callable[[VllmServer, VllmServer, int], None]
    ready: Callable[[int], bool]


def is_there(name: str) -> bool:
    """Whether the router's command is installed beside this Python."""
    return name == "proxy" or _command(name) is not None


@contextmanager
def router_before(prefill: VllmServer, decode: VllmServer, name: str) -> Iterator[int]:
    """Start a router before both servers, and end it; its port."""
    router, port = ROUTERS[name], free_port()
    log = decode.folder / f"{name}.log"
    command = router.command(prefill.url, decode.url, port)
    with Child.start(name, command, log=log) as child:

        def wait(until: Callable[[int], bool], what: str) -> None:
            done = f"{name} {what}: {log}"
            wait_until(lambda: until(port) or not child.is_alive, done, STARTS_WITHIN_S)
            assert child.is_alive, log.read_text(errors="replace")

        wait(lambda port: _status(port) is not None, "answers")
        router.introduce(prefill, decode, port)
        wait(router.ready, "is ready")
        yield port


def _proxy(prefill: str, decode: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "kvbus.integrations.proxy", "--port", str(port)]
    return [*command, "--prefill", prefill, "--decode", decode]


def _vllm_router(prefill: str, decode: str, port: int) -> list[str]:
    servers = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
    own = [*LOOPBACK, "--port", str(port), "--prometheus-port", str(free_port())]
    return [_command("vllm-router") or "", *servers, *own]


def _smg(_: str, __: str, port: int) -> list[str]:
    own = [*LOOPBACK, "--port", str(port), "--prometheus-host", "127.0.0.1"]
    own += ["--prometheus-port", str(free_port())]
    return [_command("smg") or "", "launch", "--pd-disaggregation", *own]


def _tell_smg(prefill: VllmServer, decode: VllmServer, port: int) -> None:
    """On the command line servers have no connector, and without one it asks for no handoff."""
    for kind, server in (("prefill", prefill), ("decode", decode)):
        worker = {"url": server.url, "worker_type": kind, "runtime_type": "vllm"}
        spec = {**worker, "kv_connector": "NixlConnector", "kv_role": "kv_both"}
        assert _asked(port, "POST", spec)["status"] == "accepted"


def _smg_ready(port: int) -> bool:
    return [worker["status"] for worker in _asked(port, "GET")["workers"]] == ["ready", "ready"]


def _asked(port: int, method: str, body: object = None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, "/workers", json.dumps(body) if body else None, headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def _status(port: int) -> int | None:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _healthy(port: int) -> bool:
    return _status(port) == 200


def _command(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent))


ROUTERS: Mapping[str, Router] = {
    "proxy": Router(_proxy, lambda *_: None, _healthy),
    "vllm-router": Router(_vllm_router, lambda *_: None, _healthy),
    "smg": Router(_smg, _tell_smg, _smg_ready),
}
