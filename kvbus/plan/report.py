"""A plan in words, on a terminal and as JSON: what is read from whom, each path, and why one.

Refuses to list more reads on a terminal than a person reads; all are in the JSON.
"""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from kvbus.console import Console
from kvbus.geometry import GroupSpec
from kvbus.plan.paths import PathPlan
from kvbus.plan.plan import PathOption, Plan, PlannedRead
from kvbus.plan.spec import PlannedEngine
from kvbus.planning.fetch_shape import ALL_PATHS, LONG_RUN_BYTES, Path
from kvbus.text import bytes_text, numbers_text

MAX_ROWS = 40
CHOSEN = "green"
HOW = {
    Path.DIRECT: "straight from blocks to blocks",
    Path.PACKED: "one a box, gathered before and scattered after it",
    Path.REORDERED: "gathered so that each block is read into its place",
    Path.MAPPED: "copied from blocks to blocks by the decode agent, without a READ",
}


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, and half-open intervals as lists of two; what is not possible is null."""
    return {
        "from": _engine_json(plan.prefill),
        "to": _engine_json(plan.decode),
        "tokens": [plan.options.first_token, plan.options.tokens],
        "bytes": plan.num_bytes,
        "reads": plan.reads,
        "unread_ranks": plan.unread_ranks,
        "paths": {path: plan.paths.get(path) for path in ALL_PATHS},
        "choice": {
            "path": plan.chosen,
            "is_forced": plan.options.path is not PathOption.AUTO,
            "reason": explain_choice(plan),
        },
        "slot_bytes": plan.options.slot_bytes,
    }


def _engine_json(planned: PlannedEngine) -> dict[str, Any]:
    return {
        "model": planned.engine.model,
        "tp": planned.engine.tp_size,
        "pp": planned.engine.pp_size,
        "axes": planned.layout.axes,
        "groups": [_group_json(group) for group in planned.engine.groups],
    }


def _group_json(group: GroupSpec) -> dict[str, Any]:
    return {
        "name": group.name,
        "layers": group.layers,
        "block": group.block_size,
        "kv_heads": group.num_kv_heads,
        "head": group.head_dim,
        "dtype": group.dtype,
        "parts": group.parts,
        "window": group.window,
        "state": [[one.name, one.num_units, one.unit_bytes] for one in group.state],
    }


def print_plan(plan: Plan, console: Console) -> None:
    """The two sides, the tables and the lines below them."""
    console.print(Text(f"from  {_engine_line(plan.prefill)}"))
    console.print(Text(f"to    {_engine_line(plan.decode)}\n"))
    console.print(_read_table(plan))
    if len(plan.reads) > MAX_ROWS:
        console.print(f"and {len(plan.reads) - MAX_ROWS} more: --json has them all")
    console.print(f"{bytes_text(plan.num_bytes)} in all")
    if plan.reads and plan.unread_ranks:
        console.print(f"nothing is read from prefill ranks {numbers_text(plan.unread_ranks)}")
    console.print()
    console.print(_path_table(plan))
    if line := describe_joined(plan):
        console.print(line)
    console.print(f"{plan.chosen}: {explain_choice(plan)}", style=CHOSEN)
    console.print(Text(f"slots of {bytes_text(plan.options.slot_bytes)}"))


def _engine_line(planned: PlannedEngine) -> str:
    engine = planned.engine
    groups = "; ".join(describe_group(group) for group in engine.groups)
    return f"tp={engine.tp_size} pp={engine.pp_size} {'.'.join(planned.layout.axes)}; {groups}"


def _read_table(plan: Plan) -> Table:
    ranks = (Column(heading, justify="right") for heading in ("prefill rank", "decode rank"))
    last = Column("bytes", justify="right", no_wrap=True)
    table = _table("Reads", *ranks, "group", "layers", "heads", "positions", last)
    for read in plan.reads[:MAX_ROWS]:
        table.add_row(
            str(read.prefill_rank),
            str(read.decode_rank),
            Text(read.group),
            numbers_text(read.layers),
            Text(describe_heads(plan, read)),
            f"{read.positions[0]} to {read.positions[1]}",
            bytes_text(read.num_bytes),
        )
    return table


def _path_table(plan: Plan) -> Table:
    same_machine = plan.options.same_machine
    moved = "READs,\nruns" if same_machine else "READs"
    headings = (moved, "mean", "boxes", "over-\nread")
    columns = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = _table("Paths", Column("path", no_wrap=True), *columns)
    for path in ALL_PATHS:
        if path is Path.MAPPED and not same_machine:
            continue
        found = plan.paths.get(path)
        cells = _cells(found) if found else ["cannot" if plan.num_bytes else ""]
        table.add_row(path, *cells, style=CHOSEN if path is plan.chosen else "")
    return table


def _cells(path: PathPlan) -> list[str]:
    in_boxes = path.num_boxes > 0
    return [
        f"{path.num_descriptors + path.num_copied_runs:,}",
        bytes_text(path.mean_bytes),
        f"{path.num_boxes:,}" if in_boxes else "",
        bytes_text(path.over_read_bytes),
    ]


def _table(title: str, *columns: Column | str) -> Table:
    return Table(
        *columns,
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def explain_choice(plan: Plan) -> str:
    """One sentence, without its full stop."""
    if not plan.num_bytes:
        return "there is nothing to read"
    others = ", ".join(
        f"{path} would move {_moves(path, one)}"
        for path, one in plan.paths.items()
        if path is not plan.chosen
    )
    others = f"; {others}" if others else ""
    if plan.options.path is not PathOption.AUTO:
        return f"asked for with --path{others}"
    why = _rule(plan) if others else "it is the only path that this handoff can take"
    chosen = plan.paths[plan.chosen]
    return f"{why}: {_moves(plan.chosen, chosen)} on average, {HOW[plan.chosen]}{others}"


def _rule(plan: Plan) -> str:
    """What of `choose_path` applies."""
    long = bytes_text(LONG_RUN_BYTES)
    if plan.chosen is Path.MAPPED:
        return "memory that is mapped is copied once"
    if plan.chosen is Path.DIRECT:
        is_long = plan.paths[Path.DIRECT].mean_bytes >= LONG_RUN_BYTES and not plan.repeated_bytes
        return f"runs have {long} or more" if is_long else "it is so little"
    if plan.repeated_bytes:
        return "several decode ranks read the same"
    return f"runs are shorter than {long}"


def describe_joined(plan: Plan) -> str:
    """What the packed path reads for several ranks at once; empty when it is nothing."""
    packed = plan.paths.get(Path.PACKED)
    if packed is None or packed.scattered_bytes <= packed.num_bytes:
        return ""
    return (
        f"{Path.PACKED} reads what several decode ranks hold alike once:"
        f" {bytes_text(packed.num_bytes)} for {bytes_text(packed.scattered_bytes)}"
    )


def describe_group(group: GroupSpec) -> str:
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


def describe_heads(plan: Plan, read: PlannedRead) -> str:
    """The heads of a read, or the units of a state's parts."""
    numbers = numbers_text(range(*read.heads))
    if plan.decode.engine.group(read.group).state:
        return f"{', '.join(read.parts)} {numbers}"
    return numbers


def _moves(path: Path, planned: PathPlan) -> str:
    """How many READs of how many bytes, or runs that are copied."""
    count, one = planned.num_descriptors, "READ"
    if path is Path.MAPPED:
        count, one = planned.num_copied_runs, "run"
    return f"{count:,} {one}{'' if count == 1 else 's'} of {bytes_text(planned.mean_bytes)}"
