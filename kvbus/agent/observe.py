"""Log lines and metrics of an agent."""

import asyncio
import atexit
import io
import json
import logging
import math
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
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
    """Configure structlog for the whole process; every line carries ``context``.

    A thread writes the lines. Before `os._exit`, call the returned function: it waits for them up
    to `FLUSHES_WITHIN_S`.
    """
    pretty = style == "console" or (style == "auto" and sys.stderr.isatty())
    writer = LineWriter(sys.stderr.fileno())
    sys.stderr = _Stderr(writer)
    atexit.register(writer.flush)
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
    """A processor; context variables would miss other threads, and structlog's stamper is slow."""

    def __init__(self, context: Mapping[str, str]) -> None:
        self._context = context
        self._now = 0, ""

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        second, us = divmod(time.time_ns() // 1000, 1_000_000)
        known, text = self._now  # one tuple, because other threads log too
        if second != known:
            self._now = second, (text := time.strftime("%FT%T", time.gmtime(second)))
        event.update(self._context)
        event["level"], event["timestamp"] = method, f"{text}.{us:06}Z"
        if "exc_info" in event:
            return structlog.processors.format_exc_info(logger, method, event)
        return event


class LostLines(Collector):
    def __init__(self) -> None:
        self.number, self.last_at_s = 0, -math.inf

    def add(self, number: int) -> None:
        self.number += number
        self.last_at_s = time.monotonic()

    def collect(self) -> Iterable[CounterMetricFamily]:
        meaning = "Log lines that were lost: the disk is full, or the reader of stderr is too slow."
        yield CounterMetricFamily("kvbus_lost_log_lines", meaning, value=self.number)


LOST_LINES = LostLines()
MAX_WAITING_CHARS = 4 << 20
FLUSHES_WITHIN_S = 1.0


# stderr may be a full pipe, a stopped terminal (Ctrl-S), or a file on a server that does not
# answer. A write then blocks for as long as that lasts, and an event loop that writes would block
# too.
#
#   event loop ──┐
#   threads ─────┼─▶ lines, `MAX_WAITING_CHARS` at most ─▶ one thread ─▶ stderr
#   sys.stderr ──┘
#
# The loop wakes the thread once per iteration, at the end. Earlier, the two would compete for the
# interpreter while an engine waits for its reply.
class LineWriter:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[str] = []
        self._num_chars = 0
        self._wakes_at_end_of_turn = self._is_writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="kvbus-log", daemon=True).start()

    def info(self, line: str) -> None:
        with self._changed:
            if self._num_chars + len(line) > MAX_WAITING_CHARS:
                LOST_LINES.add(1)
                return
            self._lines.append(line)
            self._num_chars += len(line)
        if self._wakes_at_end_of_turn:
            return
        try:
            asyncio.get_running_loop().call_soon(self._wake)
        except RuntimeError:  # this thread has no loop
            self._wake()
        else:
            self._wakes_at_end_of_turn = True

    debug = msg = info

    def warning(self, line: str) -> None:
        self.info(line)
        self._wake()

    error = exception = warning

    def critical(self, line: str) -> None:
        self.info(line)
        self.flush()

    def flush(self) -> None:
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._is_writing), FLUSHES_WITHIN_S)

    def _wake(self) -> None:
        self._wakes_at_end_of_turn = False
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        num_reported, is_cut = 0, False
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                lines, self._lines, self._num_chars = self._lines, [], 0
                self._is_writing = True
            # A partly written line is ended first.
            text = "\n".join([*([""] if is_cut else []), *lines, ""]).encode(errors="replace")
            done = 0
            try:
                while done < len(text):
                    done += os.write(self._fd, memoryview(text)[done:])
            except OSError:
                with self._changed:
                    LOST_LINES.add(min(len(lines), text.count(b"\n", done)))
                is_cut = not text.endswith(b"\n", 0, done) if done else is_cut
            else:
                is_cut, num_lost = False, LOST_LINES.number - num_reported
                if num_lost and not self._lines:  # a full queue would drop this report
                    num_reported += num_lost
                    log.warning("lines.lost", num_lines=num_lost)


class _Stderr(io.TextIOBase):
    def __init__(self, writer: LineWriter) -> None:
        self._writer, self._begun = writer, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._writer.warning(line)
        return len(text)


def _render_json(_logger: object, _method: str, event: EventDict) -> str:
    """Render with msgspec, in a tenth of the time of the standard json."""
    try:
        return printable(msgspec.json.encode(event, enc_hook=repr).decode())
    except UnicodeEncodeError:  # a lone surrogate, as a file name may contain
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
    def __init__(self, read: Callable[[], dict[str, float]], meanings: dict[str, str]) -> None:
        self._read = read
        self._meanings = meanings

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"kvbus_{name}", self._meanings[name], value=value)


# A handoff only adds plain numbers in the loop. A scrape makes samples of them. The counters and
# histograms of prometheus_client cost 30 µs per handoff. They also write into the folder
# PROMETHEUS_MULTIPROC_DIR if it is set; vLLM then serves our numbers as its own.
class Tally(Collector):
    """A counter: in the event loop, add to ``values``, keyed by label values."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...]) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self.values = defaultdict[tuple[str, ...], float](float, {} if labels else {(): 0.0})

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


class Times(Collector):
    def __init__(
        self, name: str, meaning: str, label: str, of: Iterable[str], buckets_s: Sequence[float]
    ) -> None:
        self._name, self._meaning, self._labels = name, meaning, [label] if label else []
        self._buckets_s = buckets_s
        self._rows = {one: [0.0] * (len(buckets_s) + 2) for one in of}
        """Counts per bucket, then the sum in seconds."""

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of one handoff, by label; 0 means absent."""
        for one, lasted_s in seconds.items():
            if lasted_s:
                row = self._rows[one]
                row[bisect_left(self._buckets_s, lasted_s)] += 1
                row[-1] += lasted_s

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        bounds = [*map(floatToGoString, self._buckets_s), "+Inf"]
        for one, (*counts, sum_s) in self._rows.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([one] if self._labels else [], buckets, sum_s)
        yield family


class AgentMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(LOST_LINES)
        self.loop_lag_s = self.times(
            "kvbus_event_loop_lag_seconds",
            "Delay of a timer in the event loop.",
            buckets_s=LAG_BUCKETS_S,
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
        self,
        name: str,
        meaning: str,
        *,
        label: str = "",
        of: Iterable[str] = ("",),
        buckets_s: Sequence[float] = STAGE_BUCKETS_S,
    ) -> Times:
        made = Times(name, meaning, label, of, buckets_s)
        self.registry.register(made)
        return made

    async def watch_loop_lag(self) -> None:
        """Measure the lag, at a cost of about 0.1 % of a core."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)  # anyio's sleep costs more, ten times a second
            self._lags_s.append(max(0.0, loop.time() - due))
            self.loop_lag_s.add({"": self._lags_s[-1]})

    def add_readings(self, read: Callable[[], dict[str, float]], meanings: dict[str, str]) -> None:
        self.registry.register(_Readings(read, meanings))


log = structlog.get_logger()

WINDOW_S, MAX_LINES = 1.0, 20


class LimitedLog:
    """A log of up to `MAX_LINES` per second; unlimited at debug."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_bound = not log.is_enabled_for(logging.DEBUG)
        self._num_lines = 0

    def write(self, event: str, *, level: str, **fields: object) -> None:
        self._num_lines += 1
        if self._num_lines == 1:
            self._loop.call_later(WINDOW_S, self._end_window)
        if self._num_lines <= MAX_LINES or not self._has_bound:
            getattr(log, level)(event, **fields)

    def _end_window(self) -> None:
        num_left_out, self._num_lines = self._num_lines - MAX_LINES, 0
        if num_left_out > 0 and self._has_bound:
            log.warning("lines.left_out", num_lines=num_left_out)


_MISTAKES = (ErrorCode.FORBIDDEN, ErrorCode.PROMPT_MISMATCH, ErrorCode.INVALID)


class Refusals:
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
        was_over = op == Release.op and error.code not in _MISTAKES
        if was_over or error.code is ErrorCode.CANCELLED:  # the lease, or the sender cancelled it
            log.debug("request.refused", **fields)
        else:
            level = "info" if error.code is ErrorCode.OFFER_OPEN else "warning"
            self._lines.write("request.refused", level=level, **fields)
