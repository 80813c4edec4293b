"""Owns what a check says: a finding, how bad it is, and the verdict over all of them.

Refuses to know how anything was found out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """From good to bad."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 is good; more is worse."""
        return list(Severity).index(self)


class Verdict(StrEnum):
    """What all findings come to."""

    WORKS = "works"
    LIMITED = "limited"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at; ``name`` is ``family.subject`` and stays the same.

    ``found`` and ``why`` are for people, ``values`` for programs: their keys carry units. A warning
    or an error has a ``mend``, what to do; ``command`` is a line of shell that does it.
    """

    name: str
    severity: Severity
    found: str
    why: str = ""
    mend: str = ""
    command: str = ""
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The first part of the name."""
        return self.name.partition(".")[0]

    @property
    def subject(self) -> str:
        """The name without its family."""
        return self.name.partition(".")[2]

    @property
    def is_complaint(self) -> bool:
        """Whether something should be done about it."""
        return self.severity.rank >= Severity.WARNING.rank


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by severity; those of one severity stay in their order."""
    return sorted(findings, key=lambda finding: -finding.severity.rank)


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """What they come to: notes do not count."""
    worst = max((finding.severity.rank for finding in findings), default=0)
    if worst >= Severity.ERROR.rank:
        return Verdict.BROKEN
    return Verdict.LIMITED if worst >= Severity.WARNING.rank else Verdict.WORKS


def sentence_of(findings: Iterable[Finding]) -> str:
    """The verdict in one sentence that names the complaints, worst first."""
    complaints = worst_first(finding for finding in findings if finding.is_complaint)
    verdict = verdict_of(complaints)
    named = ", ".join(finding.name for finding in complaints)
    if verdict is Verdict.WORKS:
        return "kvbus works on this machine"
    if verdict is Verdict.LIMITED:
        return f"kvbus works on this machine, with limits: {named}"
    return f"kvbus does not work on this machine: {named}"


def exit_status_of(findings: Iterable[Finding], *, strict: bool) -> int:
    """0 when kvbus works here, 1 when it does not; with ``strict`` limits are enough for 1."""
    verdict = verdict_of(findings)
    return int(verdict is Verdict.BROKEN or (strict and verdict is Verdict.LIMITED))
