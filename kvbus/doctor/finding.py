"""Findings of checks, their verdict, and their output."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


OK, NOTE, WARNING, ERROR = Severity
STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}
VERDICTS = {OK: "works", NOTE: "works", WARNING: "limited", ERROR: "broken"}
SENTENCES = {
    "works": "kvbus works on this machine",
    "limited": "kvbus works on this machine, with limits: ",
    "broken": "kvbus does not work on this machine: ",
}
_ORDER = list(Severity)


class Finding(msgspec.Struct):
    """The result of one check; ``name`` is ``family.subject`` and stable.

    ``found`` and ``why`` are for people, ``values`` for programs; its keys carry units. ``command``
    is a shell line for ``fix``.
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
        return self.name.partition(".")[0]

    @property
    def is_complaint(self) -> bool:
        return self.severity in (WARNING, ERROR)


class Report:
    """Findings in the order of their checks, and their verdict, which ignores notes."""

    def __init__(self, findings: Sequence[Finding], *, strict: bool) -> None:
        self._findings, self._strict = findings, strict
        self._worst_first = sorted(findings, key=lambda one: -_ORDER.index(one.severity))
        self._complaints = [one for one in self._worst_first if one.is_complaint]
        self._worst = self._worst_first[0].severity if findings else OK
        self.exit_status = int(self._worst is ERROR or (strict and self._worst is WARNING))

    @property
    def sentence(self) -> str:
        return SENTENCES[VERDICTS[self._worst]] + ", ".join(one.name for one in self._complaints)

    def as_json(self, version: str) -> dict[str, object]:
        counts = Counter(one.severity for one in self._findings)
        return {
            "kvbus": version,
            "verdict": VERDICTS[self._worst],
            "sentence": self.sentence,
            "exit_status": self.exit_status,
            "strict": self._strict,
            "counts": {severity: counts[severity] for severity in Severity},
            "findings": [
                {"family": one.family, **msgspec.structs.asdict(one)} for one in self._worst_first
            ],
        }

    def shown(self) -> Iterator[RenderableType]:
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(overflow="fold")
        for one in sorted(self._findings, key=lambda one: _ORDER.index(one.severity)):
            table.add_row(
                Text(one.severity, STYLES[one.severity]),
                Text.assemble((one.name, "bold"), f": {one.found}"),
            )
            for label, text in (("why", one.why), ("fix", one.fix), ("run", one.command)):
                if text and (one.is_complaint or label == "why"):
                    table.add_row("", Text.assemble((f"{label}: ", "bold"), text))
        yield table
        yield Text(f"\n{self.sentence}", STYLES[self._worst])
