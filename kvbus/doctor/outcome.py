"""Owns the JSON of an examination: its keys stay.

Refuses to leave anything out that the tables show.
"""

from collections import Counter
from collections.abc import Sequence

from kvbus.doctor.finding import (
    Finding,
    Severity,
    exit_status_of,
    sentence_of,
    verdict_of,
    worst_first,
)


def as_values(findings: Sequence[Finding], *, version: str, strict: bool) -> dict[str, object]:
    """Plain values, the worst findings first; docs/operations.md says what each key means."""
    counts = Counter(finding.severity for finding in findings)
    return {
        "kvbus": version,
        "verdict": verdict_of(findings).value,
        "sentence": sentence_of(findings),
        "exit_status": exit_status_of(findings, strict=strict),
        "strict": strict,
        "counts": {severity.value: counts[severity] for severity in Severity},
        "findings": [_finding(one) for one in worst_first(findings)],
    }


def _finding(one: Finding) -> dict[str, object]:
    return {
        "name": one.name,
        "family": one.family,
        "severity": one.severity.value,
        "found": one.found,
        "why": one.why,
        "mend": one.mend,
        "command": one.command,
        "values": dict(one.values),
    }
