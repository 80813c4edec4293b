"""Owns what a check says: a finding, how bad it is, and the verdict over all of them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """From good to bad."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


OK, NOTE, WARNING, ERROR = Severity


class Verdict(StrEnum):
    """What all findings come to."""

    WORKS = "works"
    LIMITED = "limited"
    BROKEN = "broken"


class Finding(msgspec.Struct):
    """One thing that was looked at; ``name`` is ``family.subject`` and stays the same.

    ``found`` and ``why`` are for people, ``values`` for programs: their keys carry units. A warning
    or an error has a ``fix``, what to do; ``command`` is a line of shell that does it. One that is
    ok needs no reason and no fix, and has none.
    """

    name: str
    severity: Severity
    found: str
    values: Mapping[str, object] = {}
    why: str = ""
    fix: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        if self.severity is OK:
            self.why = self.fix = self.command = ""

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
        return self.severity in (WARNING, ERROR)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by severity; those of one severity stay in their order."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """What they come to: notes do not count."""
    found = {finding.severity for finding in findings}
    if ERROR in found:
        return Verdict.BROKEN
    return Verdict.LIMITED if WARNING in found else Verdict.WORKS


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


def as_json(findings: Sequence[Finding], *, version: str, strict: bool) -> dict[str, object]:
    """What ``--json`` prints; docs/doctor.md says what each key means."""
    counts = Counter(finding.severity for finding in findings)
    return {
        "kvbus": version,
        "verdict": verdict_of(findings),
        "sentence": sentence_of(findings),
        "exit_status": exit_status_of(findings, strict=strict),
        "strict": strict,
        "counts": {severity: counts[severity] for severity in Severity},
        "findings": [
            {"family": one.family, **msgspec.structs.asdict(one)} for one in worst_first(findings)
        ],
    }
