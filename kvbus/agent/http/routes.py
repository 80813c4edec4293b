"""What there is at the HTTP port of an agent.

The page itself is three files in the folder beside this one, which ask `/live` and `/trace` again
and again.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from kvbus.agent.http.answer import Answer, Query, Route, as_json
from kvbus.agent.http.health import Health
from kvbus.agent.http.loop_asker import LoopAsker
from kvbus.agent.process.self_report import SelfReport
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.cost import Cost
from kvbus.protocol.live import Live
from kvbus.protocol.peer import Status
from kvbus.protocol.trace import Trace

PAGE = Path(__file__).parent / "page"
LIVE_S = 0.1
"""So old may be what `/live` tells: all pages that ask within that time cost as much as one."""


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
        return as_json(self._loop.ask(lambda: self._report().status(asked)))

    def _trace(self, query: Query, _: str) -> Answer:
        name = query.get("id", "")
        asked = Trace(request_id=name, offer_id=name, fetch_id=name)
        return as_json(self._loop.ask(lambda: self._report().trace(asked)))

    def _cost(self, query: Query, _: str) -> Answer:
        try:
            asked = msgspec.convert(query, Cost, strict=False)
        except msgspec.ValidationError as error:
            raise LocalError(f"/cost: {error}", code=ErrorCode.INVALID) from error
        return as_json(self._loop.ask(lambda: self._report().service.cost(asked)))

    def _tell_live(self, query: Query, _: str) -> Answer:
        wanted = query.get("recent", "")
        number = int(wanted) if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 else 0
        live = self._newest_live()
        return as_json(structs.replace(live, recent=live.recent[:number]))

    def _newest_live(self) -> Live:
        """Made again by whoever asks first once it is too old."""
        if self._live is None or time.monotonic() >= self._live[0] + LIVE_S:
            # The loop is asked twice, so that it goes on in between.
            finish = self._loop.ask(lambda: self._report().live())
            samples = self._loop.ask(lambda: list(self._registry.collect()))
            self._live = time.monotonic(), finish(_samples(samples))
        return self._live[1]


def _file(name: str, content_type: str) -> Route:
    return Route(lambda *_: Answer((PAGE / name).read_bytes(), content_type))


def _samples(families: Iterable[Metric]) -> dict[str, float]:
    """Each sample by its name and labels, as the Prometheus page writes them."""
    samples: Iterable[Sample] = (one for family in families for one in family.samples)
    return {f"{one.name}{_labels(one)}": one.value for one in samples}


def _labels(sample: Sample) -> str:
    pairs = [f'{name}="{value}"' for name, value in sorted(sample.labels.items())]
    return f"{{{','.join(pairs)}}}" if pairs else ""
