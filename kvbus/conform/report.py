"""What conform prints: a table of all rules, and what was seen of those that failed.

It needs no colour, and no more than 80 columns.
"""

from collections import Counter
from collections.abc import Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbus.conform.book import Outcome, Verdict
from kvbus.console import Console

STYLES = {Verdict.PASSED: "green", Verdict.FAILED: "bold red", Verdict.UNTRIED: "yellow"}


def sentence_of(outcomes: Sequence[Outcome]) -> str:
    """What all come to."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    failed = ", ".join(one.name for one in outcomes if one.verdict is Verdict.FAILED)
    if failed:
        return f"the engine does not conform: {failed}"
    untried = counts[Verdict.UNTRIED]
    rest = f"; {untried} could not be tried" if untried else ""
    return f"the engine conforms to all {counts[Verdict.PASSED]} rules that were tried{rest}"


def exit_status_of(outcomes: Sequence[Outcome]) -> int:
    """1 when a rule failed, or none was tried."""
    verdicts = {outcome.verdict for outcome in outcomes}
    return int(Verdict.FAILED in verdicts or Verdict.PASSED not in verdicts)


def print_report(outcomes: Sequence[Outcome], console: Console) -> None:
    """All rules, then what was seen of those that failed, then the sentence."""
    table = _grid(7, 24)
    for one in outcomes:
        text = one.rule if one.verdict is not Verdict.UNTRIED else f"{one.rule} {one.seen[0]}."
        table.add_row(Text(one.verdict, STYLES[one.verdict]), Text(one.name), Text(text))
    console.print(table)
    for one in outcomes:
        if one.verdict is Verdict.FAILED:
            console.print("", *_complaint(one), sep="\n")
    console.print("", Text(sentence_of(outcomes)), sep="\n")


def _complaint(one: Outcome) -> tuple[Text, Padding]:
    head = Text.assemble(("failed ", STYLES[Verdict.FAILED]), one.name)
    table = _grid(6)
    table.add_row("rule", Text(one.rule))
    table.add_row("page", Text(one.page))
    for seen in one.seen:
        table.add_row("seen", Text(seen))
    table.add_row("times", Text(f"{one.num_wrong} of {one.num_looks} looks"))
    return head, Padding(table, (0, 0, 0, 2))


def _grid(*widths: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    return table
