"""Engines and proxies of one test, and the log lines of both; all end with the test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import structlog

from kvbus.integrations.proxy.app import Proxy
from kvbus.integrations.proxy.options import ProxyOptions
from tests.agents import wait_until
from tests.integrations.proxy.engines import WITHIN_S, Behaviour, Engine, Running, offers, says

StartEngine = Callable[..., Engine]
StartProxy = Callable[..., httpx.Client]


@pytest.fixture
def logs() -> Iterator["Logs"]:
    with structlog.testing.capture_logs() as lines:
        yield Logs(lines)


class Logs:
    """The log lines so far."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self._lines) if line["event"] == event]

    def first(self, event: str) -> dict[str, Any]:
        """The first line of ``event``, once it is there."""
        return self.several(1, event)[0]

    def several(self, number: int, event: str) -> list[dict[str, Any]]:
        """The lines of ``event``, once there are that many: an answer comes before its line."""
        wait_until(lambda: len(self.of(event)) >= number, f"{number} {event} logged", WITHIN_S)
        return self.of(event)


@pytest.fixture
def servers() -> Iterator[list[Running | Engine]]:
    """All that is to be stopped; at the same time, as each takes a while."""
    running: list[Running | Engine] = []
    yield running
    for server in running:
        server.begin_to_stop()
    for server in reversed(running):
        server.stop()


@pytest.fixture
def engine(servers: list[Running | Engine]) -> StartEngine:
    def start(behaviour: Behaviour) -> Engine:
        made = Engine(behaviour)
        made.start()
        servers.append(made)
        return made

    return start


@pytest.fixture
def prefill(engine: StartEngine) -> Engine:
    return engine(offers())


@pytest.fixture
def decode(engine: StartEngine) -> Engine:
    return engine(says(200, {"choices": [{"text": "abc"}]}))


@pytest.fixture
def proxy(servers: list[Running | Engine], logs: Logs) -> Iterator[StartProxy]:
    """Starts a proxy before ``prefill`` and ``decode`` engines; returns its client."""
    with ExitStack() as clients:

        def start(prefill: list[Engine], decode: list[Engine], **options: Any) -> httpx.Client:
            settings = ProxyOptions(
                prefill=[engine.url for engine in prefill],
                decode=[engine.url for engine in decode],
                **{"health_interval_s": 3600.0, **options},
            )
            served = Running(Proxy(settings).asgi, lifespan="on")
            servers.append(served)
            base = f"http://127.0.0.1:{served.port}"
            client = httpx.Client(base_url=base, timeout=WITHIN_S, trust_env=False, verify=False)  # noqa: S501 - it only speaks plain HTTP
            return clients.enter_context(client)

        yield start
