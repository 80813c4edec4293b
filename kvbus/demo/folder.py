"""Owns the private folder of a run: configurations, sockets, logs that nobody asked to keep.

Refuses a place whose name leaves no room for the path of a Unix socket.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_FOLDER_BYTES = 80  # of the 107 that Linux allows; the rest is for the agents' sockets
PREFIX = "kvbus-demo-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of mode 0700 that goes with the ``with`` block; in /tmp when TMPDIR is too long."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) + len(PREFIX) > MAX_FOLDER_BYTES - 10:
        place = "/tmp"  # noqa: S108 - made 0700, with a name that nobody else has
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as folder:
        yield Path(folder)
