"""A timeline for a terminal: a line for each span, indented, with a bar where it lies in time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvbus.protocol.trace import Span
from kvbus.trace.timeline import AgentTrace, Timeline, covered_s, end_of

BAR, MIN_BAR = "█", 16
SPACE = 11
"""Between and around the columns."""
MOST_ALIKE = 3
"""More spans of one name beside each other are one line."""
STYLES = {"prefill": "cyan", "decode": "green"}


@dataclass(frozen=True, slots=True)
class Line:
    """Spans that are one line."""

    spans: Sequence[Span]
    label: str

    @property
    def error(self) -> str:
        """Of the last one that has one."""
        return next((span.error for span in reversed(self.spans) if span.error), "")


def draw_waterfall(timeline: Timeline, *, width: int) -> Table:
    """The table; ``width`` is that of the terminal. Where that is short, names are folded."""
    lines = [(agent, list(_lines(agent.spans))) for agent in timeline.agents]
    labels = [line.label for _, some in lines for line in some]
    widest = max(map(len, (*labels, *map(_heading, timeline.agents))), default=0)
    longest = len(_ms(timeline.total_s))
    num_columns = max(MIN_BAR, width - widest - 2 * longest - SPACE)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("span", overflow="fold")
    table.add_column("from", justify="right", no_wrap=True, min_width=longest)
    table.add_column("ms", justify="right", no_wrap=True, min_width=longest)
    table.add_column("", no_wrap=True)
    for agent, some in lines:
        table.add_row(Text(_heading(agent), style="bold"))
        style = STYLES[agent.answer.role]
        for line in some:
            bar = Text(
                _bar(line.spans, timeline, num_columns), style="red" if line.error else style
            )
            began_s = line.spans[0].start_s - timeline.start_s
            table.add_row(Text(line.label), _ms(began_s), _ms(covered_s(line.spans)), bar)
    return table


def reasons(timeline: Timeline) -> dict[str, str]:
    """By what ended a span, the label of the innermost line of which it did."""
    lines = (line for agent in timeline.agents for line in _lines(agent.spans))
    return {line.error: line.label.strip() for line in lines if line.error}


def _heading(agent: AgentTrace) -> str:
    answer, error_ms = agent.answer, agent.clock.error_s * 1e3
    cut = ", older ones left out" if answer.cut else ""
    return f"{answer.role} {answer.agent_id}  ± {error_ms:.3f} ms{cut}"


def _lines(spans: Sequence[Span]) -> Iterator[Line]:
    """Spans of one depth that follow each other are one line for each name when they are many."""
    for depth, run in groupby(spans, key=lambda span: span.depth):
        family, indent = list(run), "  " * depth
        names = dict.fromkeys(span.name for span in family)
        alike = {name: [span for span in family if span.name == name] for name in names}
        if max(map(len, alike.values())) <= MOST_ALIKE:
            yield from (Line([one], f"{indent}{one.name} {one.about}".rstrip()) for one in family)
        else:
            for name, some in alike.items():
                count = f" x {len(some)}" if len(some) > 1 else ""
                yield Line(some, f"{indent}{name}{count}")


def _bar(spans: Sequence[Span], timeline: Timeline, num_columns: int) -> str:
    """At least one column for a span, however short."""
    scale = num_columns / timeline.total_s if timeline.total_s else 0.0
    cells = [" "] * num_columns
    for span in spans:
        first = min(int((span.start_s - timeline.start_s) * scale), num_columns - 1)
        last = max(first + 1, round((end_of(span) - timeline.start_s) * scale))
        cells[first:last] = BAR * (min(last, num_columns) - first)
    return "".join(cells[:num_columns]).rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
