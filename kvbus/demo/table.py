"""How a run of the demo looks on a terminal of 80 columns: its requests, what they come to."""

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvbus.demo.prompts import encode
from kvbus.demo.report import DemoReport, Leaks, Served

# Two lines each, so that a row fits into 80 columns.
STAGES = {
    "resolving": "resol-\nving",
    "claiming": "claim-\ning",
    "waiting": "wait-\ning",
    "reading": "read-\ning",
    "confirming": "confirm-\ning",
}
DONE, FAILED = "green", "bold red"


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
    for heading in ("#", "tokens\nin+out", "blocks", "KiB", *STAGES.values(), "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("path")
    table.add_column("same")
    for number, served in enumerate(report.served, start=1):
        table.add_row(str(number), *_cells(served), _verdict(report, served))
    return table


def _summary_lines(report: DemoReport) -> Iterator[Text]:
    """What the run comes to, what is not as it has to be, or that all came back."""
    summary, options = report.summary(), report.options
    num_requests, num_matched = summary["requests"], summary["matched"]
    yield Text(f"prefill {options.shape('prefill')} → decode {options.shape('decode')}")
    yield Text(
        f"{num_matched} of {num_requests} outputs equal those of the model run alone,"
        " tokens and logits",
        style=DONE if num_matched == num_requests else FAILED,
    )
    if report.handoffs:
        took = _quantiles(summary["handoff_ms"])
        yield Text(f"moved {summary['bytes'] / 1e6:.1f} MB; a handoff took {took}")
        if options.prefill_chunk:
            after = _quantiles(summary["after_prefill_ms"])
            yield Text(f"after the last chunk of a prefill it took {after}")
    for why, count in report.failures.items():
        yield Text(f"{count} failed: {why}", style=FAILED)
    if report.num_unfinished:
        yield Text(f"{report.num_unfinished} did not finish", style=FAILED)
    yield _leak_line(report.leaks)


def _leak_line(leaks: Leaks | None) -> Text:
    if leaks is None:
        return Text("what is still held was not counted", style=FAILED)
    if not leaks.total:
        return Text("every block came back", style=DONE)
    return Text(
        f"still held: {leaks.prefill_blocks} blocks of the prefill engine,"
        f" {leaks.decode_blocks} of the decode engine,"
        f" {leaks.offers} offers, {leaks.fetches} fetches",
        style=FAILED,
    )


def _quantiles(ms: Mapping[str, float]) -> str:
    return f"{ms['p50']:.1f} ms (p50), {ms['p99']:.1f} ms (p99)"


def _cells(served: Served) -> list[str]:
    prefilled, decoded = served.prefilled, served.decoded
    tokens = f"{len(encode(served.prompt))}+{len(served.output)}"
    blocks = str(prefilled.num_blocks) if prefilled else ""
    if decoded is None:
        return [tokens, blocks, *[""] * (len(STAGES) + 3)]
    stages = (getattr(decoded.stages_s, stage) for stage in STAGES)
    return [
        tokens,
        blocks,
        f"{decoded.num_bytes / 1024:.0f}",
        *(f"{seconds * 1e3:.1f}" for seconds in stages),
        f"{decoded.handoff_s * 1e3:.1f}",
        decoded.path,
    ]


def _verdict(report: DemoReport, served: Served) -> Text:
    if served.failed is not None:
        return Text("failed", style=FAILED)
    if served.decoded is None or served.prompt not in report.alone:
        return Text("?", style=FAILED)  # it did not finish, or is not compared
    return Text("yes", style=DONE) if report.matches(served) else Text("NO", style=FAILED)
