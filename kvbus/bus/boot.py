"""Boot ids: the name of one life of a process, and which life a peer is in.

Refuses to go back: a message that comes late from a life that ended is told apart from a new one.
"""

import secrets
import uuid
from collections import deque
from enum import Enum, auto

_MAX_RETIRED = 8


def new_boot_id() -> str:
    """A fresh boot id; make one for each process start, and for each further client in it."""
    return uuid.uuid4().hex


def new_secret() -> str:
    """What tells a client from others that have heard its boot id."""
    return secrets.token_hex(16)


def first_request_id() -> int:
    """Where a client begins to count: at random, and an integer for those who have only floats."""
    return 1 + secrets.randbelow(2**52)


class BootChange(Enum):
    """What a boot id on a message says about the peer."""

    SAME = auto()
    FIRST = auto()
    CHANGED = auto()
    RETIRED = auto()


class BootWatch:
    """The current boot id of one peer, and the few before it."""

    def __init__(self) -> None:
        self.current: str | None = None
        self._retired: deque[str] = deque(maxlen=_MAX_RETIRED)

    def see(self, boot: str) -> BootChange:
        """Take note of ``boot``; it becomes the current one unless it was retired before."""
        previous = self.current
        if boot == previous:
            return BootChange.SAME
        if boot in self._retired:
            return BootChange.RETIRED
        self.current = boot
        if previous is None:
            return BootChange.FIRST
        self._retired.append(previous)
        return BootChange.CHANGED
