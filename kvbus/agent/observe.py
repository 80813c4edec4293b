"""What an agent lets others see of it: log lines, metrics, and the requests that it refused."""

import asyncio
import json
import logging
import math
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from structlog.typing import EventDict

from kvbus.bus import Call
from kvbus.errors import ErrorCode, KVBusError, TooEarly
from kvbus.memory.attach import AttachConnection
from kvbus.protocol.peer import Release
from kvbus.text import printable, printable_values


def configure_logs(*, level: str, style: str = "auto", **context: str) -> Callable[[], None]:
    """Set up structlog for the whole process; ``context`` is on every line.

    Call what is returned before the process leaves, for the lines of the last turn of its loop.
    ``level`` is a name of `logging`; ``style`` is ``json``, ``console``, or ``auto``: for people on
    a terminal, JSON otherwise. Lines go to stderr, so that stdout stays for results.
    """
    pretty = style == "console" or (style == "auto" and sys.stderr.isatty())
    writer = LineWriter(sys.stderr.fileno())
    structlog.configure(
        processors=[
            _Common(context),
            *((printable_values, structlog.dev.ConsoleRenderer()) if pretty else (_render_json,)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=True,
    )
    return writer.flush


class _Common:
    """Adds what is the same on every line of the process, the level, and when it was, in UTC.

    Context variables would miss other threads, and structlog's own stamper takes ten times as long.
    """

    def __init__(self, context: Mapping[str, str]) -> None:
        self._context = context
        self._now = 0, ""

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        second, us = divmod(time.time_ns() // 1000, 1_000_000)
        known, text = self._now  # one value: threads log, too
        if second != known:
            self._now = second, (text := time.strftime("%FT%T", time.gmtime(second)))
        event.update(self._context)
        event["level"], event["timestamp"] = method, f"{text}.{us:06}Z"
        if "exc_info" in event:
            return structlog.processors.format_exc_info(logger, method, event)
        return event


class LostLines(Collector):
    """How many log lines could not be written, and when the last one, by `time.monotonic`."""

    def __init__(self) -> None:
        self.number, self.last_at_s = 0, -math.inf

    def collect(self) -> Iterable[CounterMetricFamily]:
        meaning = "Log lines that could not be written, as to a disk that is full."
        yield CounterMetricFamily("kvbus_lost_log_lines", meaning, value=self.number)


LOST_LINES = LostLines()
"""Of the process, as its stderr is."""


class LineWriter:
    """Writes rendered lines; a disk that is full, or a reader that is gone, loses lines only.

    What an event loop logs in one turn is written at its end, by one system call. Warnings, and
    lines of other threads, are written at once, with all before them.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: deque[str] = deque()
        self._is_due = False
        self._lock = threading.Lock()

    def info(self, line: str) -> None:
        self._waiting.append(line)
        if self._is_due:
            return
        try:
            asyncio.get_running_loop().call_soon(self.flush)
        except RuntimeError:  # there is no loop here
            self.flush()
        else:
            self._is_due = True

    def warning(self, line: str) -> None:
        self._waiting.append(line)
        self.flush()

    debug = msg = info
    error = critical = exception = warning

    def flush(self) -> None:
        self._is_due = False
        with self._lock:
            lines = [self._waiting.popleft() + "\n" for _ in range(len(self._waiting))]
            text, done = "".join(lines).encode(errors="replace"), 0
            try:
                while done < len(text):
                    done += os.write(self._fd, text[done:])
            except OSError:
                LOST_LINES.number += text.count(b"\n", done)
                LOST_LINES.last_at_s = time.monotonic()
                if done and not text[:done].endswith(b"\n"):
                    self._waiting.appendleft("")  # ends the line that was cut


def _render_json(_logger: object, _method: str, event: EventDict) -> str:
    """One line of JSON, by msgspec, which takes a tenth of the time of the standard library."""
    try:
        return printable(msgspec.json.encode(event, enc_hook=repr).decode())
    except UnicodeEncodeError:  # half a character, as a file's name may have
        return json.dumps(event, default=repr)


STAGE_BUCKETS_S = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
LAG_INTERVAL_S = 0.1
LAG_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.05, 0.1, 0.5, 1.0,
)  # fmt: skip
NUM_LAGS = 150
LARGEST_LAG = "event_loop_largest_lag_seconds"


class _Readings(Collector):
    """Gauges that are read when somebody looks, not kept up to date in between."""

    def __init__(self, read: Callable[[], dict[str, float]], meanings: dict[str, str]) -> None:
        self._read = read
        self._meanings = meanings

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"kvbus_{name}", self._meanings[name], value=value)


# A handoff adds plain numbers, in the loop; what they are to Prometheus is made when somebody
# looks. Its own counters and histograms take locks, and some 30 µs of each handoff.
class Tally(Collector):
    """A counter: ``values`` are added to, by the values of its labels."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...]) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self.values = defaultdict[tuple[str, ...], float](float, {} if labels else {(): 0.0})

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


class Times(Collector):
    """A histogram of seconds, or one for each value ``of`` its label."""

    def __init__(self, name: str, meaning: str, label: str, of: Iterable[str]) -> None:
        self._name, self._meaning, self._labels = name, meaning, [label] if label else []
        self._rows = {one: [0.0] * (len(STAGE_BUCKETS_S) + 2) for one in of}
        """How many fell into each bucket, and the seconds of all of them."""

    def add(self, seconds: Mapping[str, float]) -> None:
        """Those of one handoff, by label; 0 is none."""
        for one, lasted_s in seconds.items():
            if lasted_s:
                row = self._rows[one]
                row[bisect_left(STAGE_BUCKETS_S, lasted_s)] += 1
                row[-1] += lasted_s

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        bounds = [*map(floatToGoString, STAGE_BUCKETS_S), "+Inf"]
        for one, (*counts, sum_s) in self._rows.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([one] if self._labels else [], buckets, sum_s)
        yield family


class AgentMetrics:
    """The registry of one agent, with the metrics that both kinds of agent have."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(LOST_LINES)
        self.loop_lag_s = Histogram(
            "kvbus_event_loop_lag_seconds",
            "How much later than asked for the event loop ran a timer.",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )
        lags_s = self._lags_s = deque([0.0], NUM_LAGS)
        meaning = "The largest of these in the last 15 s."
        self.add_readings(lambda: {LARGEST_LAG: max(lags_s)}, {LARGEST_LAG: meaning})
        self.refusals = self.tally("kvbus_refusals", "Requests that were refused, by code.", "code")

    def tally(self, name: str, meaning: str, *labels: str) -> Tally:
        made = Tally(name, meaning, labels)
        self.registry.register(made)
        return made

    def times(
        self, name: str, meaning: str, *, label: str = "", of: Iterable[str] = ("",)
    ) -> Times:
        made = Times(name, meaning, label, of)
        self.registry.register(made)
        return made

    async def watch_loop_lag(self) -> None:
        """Observe how late the event loop is, until cancelled; costs about 0.1 % of a core."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)  # less work than anyio's, ten times a second
            self._lags_s.append(max(0.0, loop.time() - due))
            self.loop_lag_s.observe(self._lags_s[-1])

    def add_readings(self, read: Callable[[], dict[str, float]], meanings: dict[str, str]) -> None:
        """Serve what ``read`` returns at each look; ``meanings`` has a sentence for each name."""
        self.registry.register(_Readings(read, meanings))


log = structlog.get_logger()

WINDOW_S, MAX_LINES = 1.0, 20


class LimitedLog:
    """Writes at most `MAX_LINES` a second, and says how many it left out; at debug, all.

    Made and used in a running event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_bound = not log.is_enabled_for(logging.DEBUG)
        self._num_lines = 0

    def write(self, event: str, *, level: str, **fields: object) -> None:
        """Log an event at ``level``, if there is room."""
        self._num_lines += 1
        if self._num_lines == 1:
            self._loop.call_later(WINDOW_S, self._end_window)
        if self._num_lines <= MAX_LINES or not self._has_bound:
            getattr(log, level)(event, **fields)

    def _end_window(self) -> None:
        num_left_out, self._num_lines = self._num_lines - MAX_LINES, 0
        if num_left_out > 0 and self._has_bound:
            log.warning("lines.left_out", num_lines=num_left_out)


_MISTAKES = (ErrorCode.FORBIDDEN, ErrorCode.INVALID)


class Refusals:
    """The refusals of one socket; each has lines of its own, so that strangers leave room."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics, self._lines = metrics, LimitedLog()

    def of_call(self, error: KVBusError, call: Call) -> None:
        self._note(call.op, call.session.boot[:8], error)

    def of_attach(self, connection: AttachConnection, op: str, error: KVBusError) -> None:
        self._note(op, f"pid {connection.peer.pid}", error)

    def _note(self, op: str, peer: str, error: KVBusError) -> None:
        if isinstance(error, TooEarly):
            return
        self._metrics.refusals.values[error.code.value,] += 1
        fields = {
            "op": op,
            "peer_boot": peer,
            "code": error.code.value,
            "reason": error.message,
            **{f"detail_{name}": value for name, value in error.detail.items()},
        }
        if op == Release.op and error.code not in _MISTAKES:
            log.debug("request.refused", **fields)  # the lease had ended by itself: so it should
        else:
            level = "info" if error.code is ErrorCode.OFFER_OPEN else "warning"
            self._lines.write("request.refused", level=level, **fields)
