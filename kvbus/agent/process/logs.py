"""Structured logs of a process: JSON lines, or aligned text on a terminal."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO

import msgspec
import structlog
from structlog.typing import EventDict

from kvbus.text import printable, printable_values


def configure_logs(*, level: str, style: str, **context: str) -> None:
    """Set up structlog for the whole process; ``context`` is on every line.

    ``level`` is a name of `logging`; ``style`` is ``auto``, ``json`` or ``console``. Lines go to
    stderr, so that stdout stays for results.
    """
    pretty = style == "console" or (style == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            partial(_add_context, context),
            structlog.processors.add_log_level,
            _add_time,
            structlog.processors.format_exc_info,
            *((printable_values, structlog.dev.ConsoleRenderer()) if pretty else (_render_json,)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=lambda *_: _LineWriter(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )


def _add_context(
    context: Mapping[str, str], _logger: object, _method: str, event: EventDict
) -> EventDict:
    """What is the same for the whole process; context variables would miss other threads."""
    event.update(context)
    return event


def _add_time(_logger: object, _method: str, event: EventDict) -> EventDict:
    """UTC, as structlog's own stamper has it, in a third of its time."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    event["timestamp"] = now.removesuffix("+00:00") + "Z"
    return event


class _LineWriter:
    """Writes rendered lines; a disk that is full, or a reader that is gone, loses lines only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Write one line at once."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line.encode(errors="replace") + b"\n")
            self._stream.flush()

    debug = info = warning = error = critical = exception = msg


def _render_json(_logger: object, _method: str, event: EventDict) -> str:
    """One line of JSON, by msgspec, which takes a tenth of the time of the standard library."""
    return printable(msgspec.json.encode(event, enc_hook=repr).decode())
