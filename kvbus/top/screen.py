"""The screen of ``kvbus top``: a column for each agent, a row for each figure, what is wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbus.top.figures import Between, Spread

NONE = ""
View = Between | str
"""An agent, or why there is nothing of it."""
Figure = Callable[[Between], str]

MOVED = {"decode": "kvbus_handoffs_total", "prefill": "kvbus_offers_total"}
TOOK = {"decode": "kvbus_handoff_seconds", "prefill": "kvbus_offer_life_seconds"}


def screen(views: Mapping[str, View]) -> RenderableType:
    """By the address that each was asked at."""
    known = [view for view in views.values() if isinstance(view, Between)]
    lines = [Text(line, style, overflow="fold") for line, style in _faults(views)]
    return Group(_table(known), *lines) if known else Group(*lines)


def _table(known: Sequence[Between]) -> Table:
    table = Table("", box=SIMPLE_HEAD, show_edge=False)
    for view in known:
        table.add_column(view.now.status.agent_id, justify="right", overflow="fold")
    rows: dict[str, Figure] = {
        "state": _state,
        "offers or handoffs a second": lambda view: _number(view.rate(MOVED[_role(view)])),
        "failed or expired a second": _failed,
        "MB read a second": lambda view: _number(view.rate("kvbus_read_bytes_total"), 1e-6),
        "MB packed a second": lambda view: _number(view.rate("kvbus_packed_bytes_total"), 1e-6),
        "ms of one, p50 / p99": lambda view: _both(view.spread(TOOK[_role(view)])),
    }
    for name, figure in rows.items():
        _add(table, name, [figure(view) for view in known])
    for stage in dict.fromkeys(stage for view in known for stage in view.stages):
        spreads = [view.spread("kvbus_stage_seconds", stage=stage) for view in known]
        _add(table, f"  {stage}", [_both(one) for one in spreads])
    for name in dict.fromkeys(name for view in known for name in view.now.status.counts):
        counts = [view.now.status.counts.get(name, NONE) for view in known]
        _add(table, name.replace("_", " "), [str(count) for count in counts])
    for name, metric in (("peers", "kvbus_peers"), ("withheld blocks", "kvbus_quarantined_blocks")):
        _add(table, name, [_gauge(view, metric) for view in known])
    lags = [view.spread("kvbus_event_loop_lag_seconds") for view in known]
    _add(table, "ms of loop lag, p50 / p99", [_both(lag) for lag in lags])
    return table


def _add(table: Table, name: str, cells: Sequence[str]) -> None:
    """A row, unless nobody has anything in it."""
    if any(cells):
        table.add_row(name, *cells)


def _faults(views: Mapping[str, View]) -> Iterator[tuple[str, str]]:
    for at, view in views.items():
        if isinstance(view, str):
            yield f"\n{at}: {view}", "red"
            continue
        for fault in view.now.faults:
            yield f"\n{view.now.status.agent_id}: {fault.what}", "red"
            yield f"  {fault.do}", ""


def _role(view: Between) -> str:
    return str(view.now.status.role)


def _state(view: Between) -> str:
    return "draining" if view.now.status.draining else "serving"


def _failed(view: Between) -> str:
    outcome = "failed" if _role(view) == "decode" else "expired"
    return _number(view.rate(MOVED[_role(view)], outcome=outcome))


def _gauge(view: Between, name: str) -> str:
    return f"{view.now.metrics[name]:.0f}" if name in view.now.metrics else NONE


def _number(value: float | None, unit: float = 1.0) -> str:
    return NONE if value is None else f"{value * unit:,.1f}"


def _both(spread: Spread | None) -> str:
    return NONE if spread is None else f"{spread.p50 * 1e3:.2f} / {spread.p99 * 1e3:.2f}"
