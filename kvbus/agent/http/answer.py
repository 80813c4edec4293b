"""What an HTTP request is answered with, and what answers it.

Refuses every method but GET and HEAD, bodies, and answers that a browser could keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

TEXT, JSON = "text/plain; charset=utf-8", "application/json"

Query = Mapping[str, str]
"""The last value of each name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    body: bytes
    content_type: str = TEXT
    status: str = "200 OK"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """What answers at a path; an open one asks for no token.

    ``reply`` is called in a thread of the server with the query and the Accept header.
    """

    reply: Callable[[Query, str], Answer]
    is_open: bool = False


def as_text(text: str, status: str = "200 OK") -> Answer:
    """One line, or some."""
    return Answer(f"{text}\n".encode(), status=status)


def as_json(value: Any) -> Answer:
    """A message, or what JSON has."""
    return Answer(msgspec.json.encode(value) + b"\n", JSON)
