"""What a check says: findings, what they come to, and how people and programs see them (pure)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class Severity(StrEnum):
    """From good to bad."""

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
    def is_complaint(self) -> bool:
        """Whether something should be done about it."""
        return self.severity in (WARNING, ERROR)


class Report:
    """Findings in the order of their checks, and what they come to; notes do not count.

    ``exit_status`` is 0 when kvbus works here, 1 when it does not; with ``strict`` limits are
    enough for 1.
    """

    def __init__(self, findings: Sequence[Finding], *, strict: bool) -> None:
        self._findings, self._strict = findings, strict
        self._worst_first = sorted(findings, key=lambda one: -_ORDER.index(one.severity))
        self._complaints = [one for one in self._worst_first if one.is_complaint]
        self._worst = self._worst_first[0].severity if findings else OK
        self.exit_status = int(self._worst is ERROR or (strict and self._worst is WARNING))

    @property
    def sentence(self) -> str:
        """The verdict in one sentence that names the complaints, worst first."""
        return SENTENCES[VERDICTS[self._worst]] + ", ".join(one.name for one in self._complaints)

    def as_json(self, version: str) -> dict[str, object]:
        """What ``--json`` prints; docs/doctor.md says what each key means."""
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
        """All findings, the worst at the end with what to do, and the verdict.

        It needs no colour, and no more than 80 columns.
        """
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(overflow="fold")
        for one in sorted(self._findings, key=lambda one: _ORDER.index(one.severity)):
            table.add_row(
                Text(one.severity, STYLES[one.severity]),
                Text.assemble((one.name, "bold"), f": {one.found}"),
            )
            for word, text in (("why", one.why), ("fix", one.fix), ("run", one.command)):
                if text and (one.is_complaint or word == "why"):
                    table.add_row("", Text.assemble((f"{word}: ", "bold"), text))
        yield table
        yield Text(f"\n{self.sentence}", STYLES[self._worst])
