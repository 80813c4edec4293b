"""Owns which of the agents of one folder has which of its other sockets.

An agent and its successor have the folder at the same time. The first seat is the folder itself,
the second a folder ``2`` in it: their sockets have the same names.
"""

from pathlib import Path
from typing import IO, Self

from kvbus.errors import ConfigError
from kvbus.memory.attach.folder import prepare_folder
from kvbus.memory.attach.path import lock_file

NUM_SEATS = 8
ENGINE_SOCKET = "engine.sock"
"""ZeroMQ binds it, and leaves its file behind."""


class Seat:
    """A folder for sockets of one process, until the end of its ``with``."""

    def __init__(self, folder: Path, lock: IO[bytes]) -> None:
        self.folder, self._lock = folder, lock

    @classmethod
    def take(cls, folder: Path) -> Self:
        """The first that is free below ``folder``; the kernel frees it when the process ends.

        Raises `ConfigError`.
        """
        for number in range(1, NUM_SEATS + 1):
            seat = folder if number == 1 else folder / str(number)
            prepare_folder(seat)
            if (lock := lock_file(seat / "seat.lock")) is not None:
                return cls(seat, lock)
        raise ConfigError(f"{NUM_SEATS} agents have {folder} already: end one of them")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / ENGINE_SOCKET).unlink(missing_ok=True)  # nobody else has the seat yet
        self._lock.close()
