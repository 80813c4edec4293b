"""Routers as real processes before two servers: kvbus' proxy, and those of others as they are.

A test sees what they answer to a client.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvbus.spawn import Child, free_port
from tests.e2e.vllm.servers import VllmServer
from tests.support.agents import wait_until

STARTS_WITHIN_S = 120.0
ANSWERS_WITHIN_S = 10.0
LOOPBACK = ("--host", "127.0.0.1")


def is_there(name: str) -> bool:
    """Whether the router's command is installed beside this Python."""
    return name == "proxy" or bool(_installed(name))


@contextmanager
def router_before(prefill: VllmServer, decode: VllmServer, name: str) -> Iterator[int]:
    """Start a router before both servers, and end it; its port."""
    port, log = free_port(), decode.folder / f"{name}.log"
    command = ROUTERS[name](prefill.url, decode.url, port)
    with Child.start(name, command, log=log) as child:

        def wait(until: Callable[[], bool], what: str) -> None:
            done = f"{name} {what}: {log}"
            wait_until(lambda: until() or not child.is_alive, done, STARTS_WITHIN_S)
            assert child.is_alive, log.read_text(errors="replace")

        wait(lambda: _health(port) is not None, "answers")
        if name == "smg":
            _tell_smg({"prefill": prefill.url, "decode": decode.url}, port)
            wait(lambda: _workers_of_smg(port) == ["ready", "ready"], "is ready")
        else:
            wait(lambda: _health(port) == 200, "is healthy")
        yield port


def _proxy(prefill: str, decode: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "kvbus.integrations.proxy", "--port", str(port)]
    return [*command, "--prefill", prefill, "--decode", decode]


def _vllm_router(prefill: str, decode: str, port: int) -> list[str]:
    servers = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
    own = [*LOOPBACK, "--port", str(port), "--prometheus-port", str(free_port())]
    return [_installed("vllm-router"), *servers, *own]


def _smg(_: str, __: str, port: int) -> list[str]:
    own = [*LOOPBACK, "--port", str(port), "--prometheus-host", "127.0.0.1"]
    own += ["--prometheus-port", str(free_port())]
    return [_installed("smg"), "launch", "--pd-disaggregation", *own]


ROUTERS: Mapping[str, Callable[[str, str, int], list[str]]] = {
    "proxy": _proxy,
    "vllm-router": _vllm_router,
    "smg": _smg,
}
"""The command of each, by the URLs of both servers and its own port."""


def _installed(name: str) -> str:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or ""


def _tell_smg(urls: Mapping[str, str], port: int) -> None:
    """On the command line servers have no connector, and without one it asks for no handoff."""
    for kind, url in urls.items():
        worker = {"url": url, "worker_type": kind, "runtime_type": "vllm"}
        spec = {**worker, "kv_connector": "NixlConnector", "kv_role": "kv_both"}
        assert json.loads(_asked(port, "POST", "/workers", spec)[1])["status"] == "accepted"


def _workers_of_smg(port: int) -> list[str]:
    workers = json.loads(_asked(port, "GET", "/workers")[1])["workers"]
    return [worker["status"] for worker in workers]


def _health(port: int) -> int | None:
    try:
        return _asked(port, "GET", "/health")[0]
    except (OSError, HTTPException):
        return None


def _asked(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
