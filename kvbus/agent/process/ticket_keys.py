"""Reads the keys that sign tickets from the files that the configuration names.

Refuses files that others can read, and keys that are too short, as `ConfigError`.
"""

import stat
from collections.abc import Sequence
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.protocol.ticket_keys import TicketKeys

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096


def load_ticket_keys(paths: Sequence[str]) -> TicketKeys | None:
    """The keys in ``paths``, in that order; None when there are none."""
    return TicketKeys([_read(Path(path)) for path in paths]) if paths else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise _wrong(f"cannot read {path}: {error.strerror}") from error
    if mode & 0o077:
        raise _wrong(f"{path} has mode {mode:04o}: others may read it; chmod 600 {path}")
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise _wrong(
            f"{path} has a key of {len(key)} bytes; {MIN_KEY_BYTES} to {MAX_KEY_BYTES} are needed, "
            f"such as from: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return key


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"key 'ticket_keys': {problem}", key="ticket_keys")
