"""What there is at the HTTP port of an agent: its page, probes, metrics, and what it reports.

The page itself is three files in the folder beside this one, which ask `/live` and `/trace` again
and again. Not alive is what only a restart mends; not ready mends itself, or another service does.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from kvbus.agent.http import Answer, Query, Route, as_text
from kvbus.agent.status import SelfReport
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.status import Cost, Fault, Live, Status
from kvbus.protocol.trace import Trace

T = TypeVar("T")

PAGE = Path(__file__).parent / "page"
ANSWERS_WITHIN_S = 2.0
LIVE_S = 0.1
"""So old may be what `/live` tells: all pages that ask within that time cost as much as one."""


class LoopAsker:
    """Has functions run by the loop of an agent, and does not wait for one that hangs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def ask(self, function: Callable[[], T]) -> T:
        """What ``function`` returns in the loop, or raises there.

        Raises `LocalError` (``timeout``) when the loop does not come to it.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:  # it is the asker's
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:  # it is closed
            raise LocalError("the agent has ended", code=ErrorCode.DRAINING) from error
        if not wait([answer], ANSWERS_WITHIN_S).done:
            answer.cancel()
            raise LocalError(
                f"the event loop has not answered within {ANSWERS_WITHIN_S:g} s",
                code=ErrorCode.TIMEOUT,
            )
        return answer.result()


class Health:
    """``ping`` asks the transport's thread; ``unready`` names reasons, and runs in the loop."""

    def __init__(
        self, loop: LoopAsker, ping: Callable[[], Future[None]], unready: Callable[[], list[Fault]]
    ) -> None:
        self._loop, self._ping, self._unready = loop, ping, unready

    def healthz(self) -> Answer:
        """503 with the reasons when a thread that moves KV or messages does not answer."""
        pong, until = self._ping(), time.monotonic() + ANSWERS_WITHIN_S  # both have the same time
        problems = [
            _problem(lambda: self._loop.ask(lambda: None)),
            _problem(lambda: pong.result(max(0.0, until - time.monotonic()))),
        ]
        return _verdict([text for text in problems if text])

    def readyz(self) -> Answer:
        """503 with the reasons when the agent would refuse work, or could not do it."""
        try:
            return _verdict([fault.what for fault in self._loop.ask(self._unready)])
        except KVBusError as error:
            return _verdict([error.message])


class AgentPages:
    """What an agent answers; its report and its metrics are read in the loop, their owner."""

    def __init__(
        self,
        loop: LoopAsker,
        *,
        registry: CollectorRegistry,
        ping: Callable[[], Future[None]],
        report: Callable[[], SelfReport],
    ) -> None:
        self._loop, self._registry, self._report = loop, registry, report
        self._live: tuple[float, Live] | None = None
        self._health = Health(loop, ping, lambda: report().unready())

    def routes(self) -> dict[str, Route]:
        """By path."""
        return {
            "/": _file("page.html", "text/html; charset=utf-8"),
            "/page.css": _file("page.css", "text/css; charset=utf-8"),
            "/page.js": _file("page.js", "text/javascript; charset=utf-8"),
            "/live": Route(self._tell_live),
            "/healthz": Route(lambda *_: self._health.healthz(), is_open=True),
            "/readyz": Route(lambda *_: self._health.readyz(), is_open=True),
            "/metrics": Route(self._metrics),
            "/status": Route(self._status),
            "/trace": Route(self._trace),
            "/cost": Route(self._cost),
        }

    def _metrics(self, _: Query, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        return Answer(self._loop.ask(lambda: encode(self._registry)), content_type)

    def _status(self, query: Query, _: str) -> Answer:
        asked = Status(fetch_id=query.get("fetch", ""), offer_id=query.get("offer", ""))
        return _as_json(self._loop.ask(lambda: self._report().status(asked)))

    def _trace(self, query: Query, _: str) -> Answer:
        name = query.get("id", "")
        asked = Trace(request_id=name, offer_id=name, fetch_id=name)
        return _as_json(self._loop.ask(lambda: self._report().trace(asked)))

    def _cost(self, query: Query, _: str) -> Answer:
        try:
            asked = msgspec.convert(query, Cost, strict=False)
        except msgspec.ValidationError as error:
            raise LocalError(f"/cost: {error}", code=ErrorCode.INVALID) from error
        return _as_json(self._loop.ask(lambda: self._report().service.cost(asked)))

    def _tell_live(self, query: Query, _: str) -> Answer:
        wanted = query.get("recent", "")
        number = int(wanted) if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 else 0
        live = self._newest_live()
        return _as_json(structs.replace(live, recent=live.recent[:number]))

    def _newest_live(self) -> Live:
        """Made again by the first question once it is too old."""
        if self._live is None or time.monotonic() >= self._live[0] + LIVE_S:
            # The loop is asked twice, so that it goes on in between.
            finish = self._loop.ask(lambda: self._report().live())
            samples = self._loop.ask(lambda: list(self._registry.collect()))
            self._live = time.monotonic(), finish(_samples(samples))
        return self._live[1]


def _problem(ask: Callable[[], object]) -> str:
    """Why it is not answered; empty when it is."""
    try:
        ask()
    except TimeoutError:
        return f"the transport's thread has not answered within {ANSWERS_WITHIN_S:g} s"
    except KVBusError as error:
        return error.message
    return ""


def _verdict(problems: Sequence[str]) -> Answer:
    if problems:
        return as_text("\n".join(problems), HTTPStatus.SERVICE_UNAVAILABLE)
    return as_text("ok")


def _as_json(value: Any) -> Answer:
    return Answer(msgspec.json.encode(value) + b"\n", "application/json")


def _file(name: str, content_type: str) -> Route:
    return Route(lambda *_: Answer((PAGE / name).read_bytes(), content_type))


def _samples(families: Iterable[Metric]) -> dict[str, float]:
    """Each sample by its name and labels, as the Prometheus page writes them."""
    samples: Iterable[Sample] = (one for family in families for one in family.samples)
    return {f"{one.name}{_labels(one)}": one.value for one in samples}


def _labels(sample: Sample) -> str:
    pairs = [f'{name}="{value}"' for name, value in sorted(sample.labels.items())]
    return f"{{{','.join(pairs)}}}" if pairs else ""
