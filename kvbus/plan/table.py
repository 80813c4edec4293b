"""How a plan looks on a terminal: what is read from whom, each path, and the choice.

Refuses to list more reads than a person reads; all are in the JSON.
"""

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvbus.geometry import GroupSpec
from kvbus.plan.paths import PathPlan
from kvbus.plan.plan import Plan, Read
from kvbus.plan.reason import reason
from kvbus.plan.shown import shown_bytes, shown_numbers, shown_time
from kvbus.plan.spec import Side
from kvbus.planning.fetch_shape import ALL_PATHS

MAX_ROWS = 40
CHOSEN = "green"


def print_plan(plan: Plan, console: Console) -> None:
    """The two sides, the tables and the lines below them."""
    console.print(
        Group(
            Text(f"from  {side_line(plan.prefill)}"),
            Text(f"to    {side_line(plan.decode)}"),
            Text(),
            read_table(plan),
            *_below_reads(plan),
            Text(),
            path_table(plan),
            *_below_paths(plan),
        )
    )


def side_line(side: Side) -> str:
    """One engine in a line."""
    engine = side.engine
    order = ".".join(side.layout.axes)
    groups = "; ".join(group_line(group) for group in engine.groups)
    return f"tp={engine.tp_size} pp={engine.pp_size} {order}; {groups}"


def group_line(group: GroupSpec) -> str:
    """One group in a few words."""
    num_layers = f"{len(group.layers)} layers"
    if group.state:
        parts = ", ".join(f"{one.name} {one.num_units}x{one.unit_bytes} B" for one in group.state)
        return f"{group.name}: {num_layers}, state of {parts}"
    window = f", window {group.window}" if group.window else ""
    heads = "latent" if len(group.parts) == 1 else f"{group.num_kv_heads} KV heads"
    return (
        f"{group.name}: {num_layers}, {heads} of {group.head_dim} {group.dtype},"
        f" blocks of {group.block_size}{window}"
    )


def read_table(plan: Plan) -> Table:
    """One row a share."""
    table = Table(
        title="Reads", box=SIMPLE_HEAD, show_edge=False, title_justify="left", padding=(0, 1, 0, 0)
    )
    for heading in ("prefill rank", "decode rank"):
        table.add_column(heading, justify="right")
    for heading in ("group", "layers", "heads", "positions"):
        table.add_column(heading)
    table.add_column("bytes", justify="right", no_wrap=True)
    for read in plan.reads[:MAX_ROWS]:
        share = read.share
        table.add_row(
            str(share.holder),
            str(share.reader),
            Text(share.group),
            shown_numbers(share.layers),
            Text(heads_of(plan, read)),
            f"{read.positions[0]} to {read.positions[1]}",
            shown_bytes(read.num_bytes),
        )
    return table


def heads_of(plan: Plan, read: Read) -> str:
    """The heads of a read, or the units of a state's parts."""
    share = read.share
    numbers = shown_numbers(range(share.first_head, share.first_head + share.num_heads))
    if plan.decode.engine.group(share.group).state:
        return f"{', '.join(share.parts)} {numbers}"
    return numbers


def path_table(plan: Plan) -> Table:
    """One row a path."""
    table = Table(
        title="Paths", box=SIMPLE_HEAD, show_edge=False, title_justify="left", padding=(0, 1, 0, 0)
    )
    table.add_column("path", no_wrap=True)
    headings = ("time", "gather", "READ", "scatter", "READs", "mean", "boxes", "over-\nread")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for path in ALL_PATHS:
        found = plan.path(path)
        cells = (
            _cells(found)
            if found
            else ["cannot" if plan.num_bytes else "", *[""] * (len(headings) - 1)]
        )
        table.add_row(path, *cells, style=CHOSEN if found is plan.chosen else "")
    return table


def _cells(path: PathPlan) -> list[str]:
    stages = path.prediction.stages
    in_boxes = path.num_boxes > 0
    return [
        shown_time(path.prediction.seconds),
        shown_time(stages.gather_s) if in_boxes else "",
        shown_time(stages.read_s),
        shown_time(stages.scatter_s) if stages.scatter_s else "",
        f"{path.num_descriptors:,}",
        shown_bytes(path.mean_bytes),
        f"{path.num_boxes:,}" if in_boxes else "",
        shown_bytes(path.over_read_bytes),
    ]


def _below_reads(plan: Plan) -> list[Text]:
    lines = []
    if len(plan.reads) > MAX_ROWS:
        lines.append(Text(f"and {len(plan.reads) - MAX_ROWS} more: --json has them all"))
    lines.append(Text(f"{shown_bytes(plan.num_bytes)} in all"))
    if plan.reads and plan.unread_ranks:
        numbers = shown_numbers(plan.unread_ranks)
        lines.append(Text(f"nothing is read from prefill ranks {numbers}"))
    return lines


def _below_paths(plan: Plan) -> list[Text]:
    rates = plan.means.rates_from or "those of the machine that kvbus is developed on"
    return [
        Text(f"{plan.chosen.path}: {reason(plan)}", style=CHOSEN),
        Text(f"rates: {rates}; slots of {shown_bytes(plan.means.slot_bytes)}"),
    ]
