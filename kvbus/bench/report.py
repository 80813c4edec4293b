"""Figures as a table for people.

Refuses colour as the only sign: a missed target says so in words.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvbus.bench.figures import Figure

VERDICTS = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}


def print_figures(figures: Sequence[Figure], console: Console) -> None:
    """Print one section for each case."""
    table = Table(box=None, pad_edge=False)
    table.add_column("case")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for heading in ("unit", "target", ""):
        table.add_column(heading)
    case = ""
    for figure in figures:
        if case and figure.case != case:
            table.add_section()
        target = "" if figure.target is None else str(figure.target)
        table.add_row(
            figure.case if figure.case != case else "",
            figure.name,
            f"{figure.value:,.3f}" if figure.value < 100 else f"{figure.value:,.0f}",
            figure.unit,
            target,
            VERDICTS[figure.met],
        )
        case = figure.case
    console.print(table)
