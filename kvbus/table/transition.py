"""A transition as data: a handler, and the states in which it can leave an entry."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound=StrEnum)
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    """``handler(entry, event, context)`` returns the commands, in order."""

    handler: Callable[..., list[Any]]
    to: tuple[S, ...]


@dataclass(frozen=True, slots=True)
class Context(Generic[L]):
    """What a handler may know of the world: the time in seconds, and the bounds of its table."""

    now: float
    limits: L
