"""How an examination looks on a terminal: a table of all findings, then the verdict with mends.

Refuses to need colour, or more than 80 columns.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbus.doctor.finding import Finding, Severity, sentence_of, worst_first

STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.ERROR: "bold red",
}
_WORD_WIDTH = max(len(severity) for severity in Severity)
_SUBJECT_WIDTH = 22


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """All findings by family, the verdict, and each complaint with its mend, worst first."""
    console.print(Group(*_families(findings), Text(sentence_of(findings), _style(findings))))
    for finding in worst_first(findings):
        if finding.is_complaint:
            console.print(Group(Text(), complaint(finding)))


def complaint(finding: Finding) -> RenderableType:
    """A finding with why it matters and what to do."""
    head = Text.assemble((f"{finding.severity} ", STYLES[finding.severity]), finding.name)
    table = _grid(6)
    table.add_row(Text("found"), Text(finding.found))
    table.add_row(Text("why"), Text(finding.why))
    table.add_row(Text("mend"), Text(finding.mend))
    if finding.command:
        table.add_row(Text("run"), Text(finding.command))
    return Group(head, Padding(table, (0, 0, 0, 2)))


def _families(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    for family, ones in groupby(findings, key=lambda finding: finding.family):
        table = _grid(_WORD_WIDTH, _SUBJECT_WIDTH)
        for one in ones:
            table.add_row(Text(one.severity, STYLES[one.severity]), Text(one.subject), _said(one))
        yield Group(Text(family, "bold"), Padding(table, (0, 0, 1, 2)))


def _said(one: Finding) -> Text:
    """What was found; a note is not in the list below, so it has its reason here."""
    if one.severity is Severity.NOTE:
        return Text(". ".join(text.rstrip(".") for text in (one.found, one.why) if text))
    return Text(one.found)


def _grid(*widths: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    return table


def _style(findings: Sequence[Finding]) -> str:
    return STYLES[max((one.severity for one in findings), key=lambda one: one.rank)]
