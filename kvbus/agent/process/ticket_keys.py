"""Reads the keys that sign tickets from the files that the configuration names.

Refuses files that others can read, and keys that are too short, as `ConfigError`.
"""

from collections.abc import Sequence
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.keys.files import read_private
from kvbus.protocol.ticket_keys import TicketKeys

MIN_KEY_BYTES = 32


def load_ticket_keys(paths: Sequence[str]) -> TicketKeys | None:
    """The keys in ``paths``, in that order; None when there are none."""
    return TicketKeys([_read(Path(path)) for path in paths]) if paths else None


def _read(path: Path) -> bytes:
    try:
        key = read_private(path).strip()
    except ConfigError as error:
        raise _wrong(error.message) from error
    if len(key) < MIN_KEY_BYTES:
        raise _wrong(
            f"{path} has a key of {len(key)} bytes; {MIN_KEY_BYTES} at least are needed, "
            f"such as from: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return key


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"key 'ticket_keys': {problem}", key="ticket_keys")
