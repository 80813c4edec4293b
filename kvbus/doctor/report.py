"""Findings on a terminal: a table of all, then the verdict, and each complaint with its fix.

It needs no colour, and no more than 80 columns.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbus.console import Console
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
    """All findings by family, the verdict, and each complaint with its fix, worst first."""
    ordered = worst_first(findings)
    console.print(*_families(findings), Text(sentence_of(findings), STYLES[ordered[0].severity]))
    for finding in ordered:
        if finding.is_complaint:
            console.print("", _complaint(finding), sep="\n")


def _complaint(finding: Finding) -> RenderableType:
    """A finding with why it matters and what to do."""
    head = Text.assemble((f"{finding.severity} ", STYLES[finding.severity]), finding.name)
    table = _grid(6)
    for word, text in (
        ("found", finding.found),
        ("why", finding.why),
        ("fix", finding.fix),
        ("run", finding.command),
    ):
        if text:
            table.add_row(word, Text(text))
    return Group(head, Padding(table, (0, 0, 0, 2)))


def _families(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    for family, ones in groupby(findings, key=lambda finding: finding.family):
        table = _grid(_WORD_WIDTH, _SUBJECT_WIDTH)
        for one in ones:
            word = Text(one.severity, STYLES[one.severity])
            table.add_row(word, Text(one.subject), Text(_line(one)))
        yield Group(Text(family, "bold"), Padding(table, (0, 0, 1, 2)))


def _line(one: Finding) -> str:
    """What was found; a note is not among the complaints below, so it has its reason here."""
    if one.severity is Severity.NOTE:
        return ". ".join(text.rstrip(".") for text in (one.found, one.why) if text)
    return one.found


def _grid(*widths: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    return table
