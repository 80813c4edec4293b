"""Owns the question whether a version is one that a requirement allows.

Refuses the finer points of Python's versions: only the numbers of a release are compared, so a
release candidate counts as its release, and what follows a ``+`` does not count.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

Release = tuple[int, ...]

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\s*")
_COMPARE: dict[str, Callable[[Release, Release], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and the text of its bounds, such as ``>=1.5.1,<2``."""

    name: str
    bounds: str


def requirement(text: str) -> Requirement | None:
    """The requirement that ``text`` states; None when it is for an extra, or is none."""
    found = _REQUIREMENT.match(text)
    if found is None or "extra" in text.partition(";")[2]:
        return None
    return Requirement(found[1], found[2].strip())


def allows(bounds: str, version: str) -> bool:
    """Whether ``version`` is within; bounds of a form that is not known here allow everything."""
    clauses = [_CLAUSE.fullmatch(clause) for clause in bounds.split(",")]
    return all(
        _COMPARE[clause[1]](*_of_one_length(_release(version), _release(clause[2])))
        for clause in clauses
        if clause is not None
    )


def _release(version: str) -> Release:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _of_one_length(one: Release, other: Release) -> tuple[Release, Release]:
    length = max(len(one), len(other))
    return one + (0,) * (length - len(one)), other + (0,) * (length - len(other))
