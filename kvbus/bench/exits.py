"""How the commands of the benchmark end when something fails: one line for each reason."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvbus.errors import ConfigError, KVBusError, leaves
from kvbus.text import printable

INTERRUPTED = 130


@contextmanager
def errors_told(command: str) -> Iterator[None]:
    """Exit status 1 when a handoff fails, 2 for what was given wrongly, 130 after Ctrl-C.

    Each line names the ``command``: of two in a pipe, both write to one terminal.
    """
    errors: list[KVBusError] = []
    status = 0
    try:
        yield
    except* KVBusError as group:
        errors = leaves(group)
        status = 2 if any(isinstance(one, ConfigError) for one in errors) else 1
    except* KeyboardInterrupt:
        sys.stderr.write(f"{command}: ended by Ctrl-C\n")
        status = INTERRUPTED
    # Several sessions may have ended for one reason.
    reasons = dict.fromkeys(map(str, errors))
    sys.stderr.writelines(f"error: {command}: {printable(reason)}\n" for reason in reasons)
    if status:
        raise typer.Exit(status)
