"""Requests of one decode engine that come with the same ticket: one reads it, the others wait.

That is so where a router passes `n` on, as vLLM makes a request of each sequence, and where it
sends a request again. Who waited finds in the engine's prefix cache what the first one has read,
and computes the rest.
"""

from collections.abc import Container
from hashlib import blake2b
from typing import Any

import msgspec

MOST_KNOWN = 4096
"""Tickets; of one that was forgotten the prefill agent says that it was used."""


class SharedTickets:
    """Which request reads by which ticket, and whether vLLM has what it has read."""

    def __init__(self) -> None:
        self._readers: dict[bytes, str] = {}
        self._reading: set[str] = set()

    def reader(self, key: bytes, request_id: str) -> str:
        """The request that reads by the ticket with this `ticket_key`: the first that asked."""
        if key not in self._readers:
            self._readers[key] = request_id
            self._reading.add(request_id)
            while len(self._readers) > MOST_KNOWN:
                del self._readers[next(iter(self._readers))]
        return self._readers[key]

    def is_reading(self, request_id: str) -> bool:
        """Whether the others have to wait for it."""
        return request_id in self._reading

    def take_over(self, key: bytes, request_id: str) -> None:
        """The first one ended before it began: ``request_id`` reads instead."""
        self._readers[key] = request_id
        self._reading.add(request_id)

    def end(self, request_id: str) -> None:
        """The request is over, so that nobody waits for it."""
        self._reading.discard(request_id)

    def note_computed(self, request_ids: Container[str]) -> None:
        """These requests are computed on: what they have read is in the prefix cache."""
        if self._reading:
            self._reading = {each for each in self._reading if each not in request_ids}


def ticket_key(ticket: dict[str, Any]) -> bytes:
    """Names a ticket by all of it: one that was altered is another.

    A ticket that names the blocks of a long prompt has tens of kilobytes: make its key once.
    """
    return blake2b(msgspec.json.encode(ticket), digest_size=16).digest()
