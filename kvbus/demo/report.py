"""What came of the demo's requests: figures for ``--json``, tables for a terminal of 80 columns.

An output matches when its tokens and the digests of all logits do.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvbus.console import Console
from kvbus.demo.messages import Computed, Step
from kvbus.demo.options import DemoOptions
from kvbus.demo.prompts import encode
from kvbus.errors import RequestRefused
from kvbus.lab.process import Taken

# What a fetch came to, by headings of two lines each, so that a row fits into 80 columns.
COLUMNS: Mapping[str, Callable[[Taken], str]] = {
    "KiB": lambda one: f"{one.fetched.num_bytes / 1024:.0f}",
    "resol-\nving": lambda one: _ms(one.fetched.stages_s.resolving),
    "claim-\ning": lambda one: _ms(one.fetched.stages_s.claiming),
    "wait-\ning": lambda one: _ms(one.fetched.stages_s.waiting),
    "read-\ning": lambda one: _ms(one.fetched.stages_s.reading),
    "taking": lambda one: _ms(one.fetched.stages_s.taking),
    "total": lambda one: _ms(one.seconds),
}
DONE, FAILED = "green", "bold red"
VARIED = ("seed", "attention", "kv_heads", "window", "path", "prefill_chunk")


@dataclass(slots=True)
class Served:
    """One request: what the engines answered so far; ``failed`` is the last of it.

    ``steps`` are those of the decode engine.
    """

    request_id: str
    prompt: str
    computed: Computed | None = None
    taken: Taken | None = None
    steps: list[Step] | None = None
    failed: RequestRefused | None = None

    @property
    def output(self) -> list[Step]:
        """The steps of both halves."""
        first = [self.computed.step] if self.computed else []
        return first + (self.steps or [])

    @property
    def after_prefill_s(self) -> float | None:
        """From the end of the prefill to the completion of the fetch; None before that."""
        if self.computed is None or self.taken is None:
            return None
        return self.taken.at_s - self.computed.at_s


@dataclass(slots=True)
class DemoReport:
    """A run, as far as it has come.

    ``alone`` are the steps of the model run alone, by prompt. ``leaks`` is what is held when
    nothing runs any more, by its name, None until it is counted. ``trouble`` says what ended the
    run early, or what did not end well; ``ended_by`` is the signal that did.
    """

    options: DemoOptions
    served: list[Served] = field(default_factory=list)
    alone: dict[str, list[Step]] = field(default_factory=dict)
    leaks: dict[str, int] | None = None
    trouble: list[str] = field(default_factory=list)
    ended_by: Signals | None = None

    def matches(self, served: Served) -> bool:
        """Whether this output equals that of the model run alone."""
        return served.steps is not None and served.output == self.alone.get(served.prompt)

    @property
    def num_matched(self) -> int:
        """How many outputs match."""
        return sum(map(self.matches, self.served))

    @property
    def not_compared(self) -> set[str]:
        """Prompts with an output that the model run alone is needed for."""
        completed = {one.prompt for one in self.served if one.steps is not None}
        return completed - self.alone.keys()

    @property
    def taken(self) -> list[Taken]:
        """The fetches that completed."""
        return [served.taken for served in self.served if served.taken is not None]

    @property
    def num_bytes(self) -> int:
        """What they have moved."""
        return sum(taken.fetched.num_bytes for taken in self.taken)

    @property
    def failures(self) -> Counter[str]:
        """How many requests failed, by ``code: message``."""
        failed = (served.failed for served in self.served)
        return Counter(f"{one.code}: {one.message}" for one in failed if one is not None)

    @property
    def num_unfinished(self) -> int:
        """How many requests have neither an output nor failed."""
        num_done = sum(one.steps is not None for one in self.served)
        return self.options.requests - num_done - self.failures.total()

    @property
    def num_leaked(self) -> int | None:
        """All that is still held; 0 is the only good figure."""
        return None if self.leaks is None else sum(self.leaks.values())

    @property
    def ok(self) -> bool:
        """All outputs match, nothing is leaked, and nothing went wrong."""
        is_whole = self.num_matched == self.options.requests and not self.trouble
        return is_whole and self.num_leaked == 0

    def summary(self) -> dict[str, Any]:
        """The figures for ``--json``; ``leaked_blocks`` is null in a run that ended early."""
        options, taken = self.options, self.taken
        after_prefill = (served.after_prefill_s for served in self.served)
        return {
            "requests": options.requests,
            "matched": self.num_matched,
            "failed": self.failures.total(),
            "failures": self.failures,
            "unfinished": self.num_unfinished,
            "trouble": self.trouble,
            "bytes": self.num_bytes,
            "handoff_ms": _quantiles_ms([one.seconds for one in taken]),
            "after_prefill_ms": _quantiles_ms([s for s in after_prefill if s is not None]),
            "paths": Counter(one.fetched.path for one in taken),
            "leaked_blocks": self.num_leaked,
            **{role: str(words) for role, words in options.sides.items()},
            **{name: getattr(options, name) for name in VARIED},
        }


def _quantiles_ms(times_s: Sequence[float]) -> dict[str, float | None]:
    """The nearest ranks of p50 and p99; None of none."""
    ordered = sorted(times_s)
    return {
        name: round(ordered[math.ceil(quantile * len(ordered)) - 1] * 1e3, 3) if ordered else None
        for name, quantile in (("p50", 0.5), ("p99", 0.99))
    }


def print_report(report: DemoReport, console: Console) -> None:
    """The table and the lines below it."""
    console.print(Group(_request_table(report), *_summary_lines(report)))


def _request_table(report: DemoReport) -> Table:
    table = Table(
        title="Handoffs (stage times in ms)",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title_justify="left",
    )
    for heading in ("#", "tokens\nin+out", "blocks", *COLUMNS):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("path")
    table.add_column("same")
    for number, served in enumerate(report.served, start=1):
        taken = served.taken
        table.add_row(
            str(number),
            f"{len(encode(served.prompt))}+{len(served.output)}",
            str(served.computed.num_blocks) if served.computed else "",
            *(cell(taken) if taken else "" for cell in COLUMNS.values()),
            taken.fetched.path if taken else "",
            _verdict(report, served),
        )
    return table


def _summary_lines(report: DemoReport) -> Iterator[Text]:
    """What the run comes to, what is not as it has to be, or that all came back."""
    summary, options = report.summary(), report.options
    num_requests, num_matched = summary["requests"], summary["matched"]
    yield Text(" → ".join(f"{role} {words}" for role, words in options.sides.items()))
    yield Text(
        f"{num_matched} of {num_requests} outputs equal those of the model run alone,"
        " tokens and logits",
        style=DONE if num_matched == num_requests else FAILED,
    )
    if report.taken:
        took = _quantiles(summary["handoff_ms"])
        yield Text(f"moved {summary['bytes'] / 1e6:.1f} MB; a handoff took {took}")
        if options.prefill_chunk:
            after = _quantiles(summary["after_prefill_ms"])
            yield Text(f"after the last chunk of a prefill it took {after}")
    for why, count in report.failures.items():
        yield Text(f"{count} failed: {why}", style=FAILED)
    if report.num_unfinished:
        yield Text(f"{report.num_unfinished} did not finish", style=FAILED)
    if report.leaks is None:
        yield Text("what is still held was not counted", style=FAILED)
    elif report.num_leaked:
        held = ", ".join(f"{number} {what}" for what, number in report.leaks.items())
        yield Text(f"still held: {held}", style=FAILED)
    else:
        yield Text("every block came back", style=DONE)


def _quantiles(ms: Mapping[str, float]) -> str:
    return f"{ms['p50']:.1f} ms (p50), {ms['p99']:.1f} ms (p99)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _verdict(report: DemoReport, served: Served) -> Text:
    if served.failed is not None:
        return Text("failed", style=FAILED)
    if served.steps is None or served.prompt not in report.alone:
        return Text("?", style=FAILED)  # it did not finish, or is not compared
    return Text("yes", style=DONE) if report.matches(served) else Text("NO", style=FAILED)
