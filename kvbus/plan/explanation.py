"""A plan in words: its groups, its heads, and why its path was chosen."""

from kvbus.geometry import GroupSpec
from kvbus.plan.paths import PathPlan
from kvbus.plan.plan import Plan, PlannedRead
from kvbus.planning.fetch_shape import Path
from kvbus.text import bytes_text, numbers_text, time_text

HOW = {
    Path.DIRECT: "straight from blocks to blocks",
    Path.PACKED: "one a box, gathered before and scattered after it",
    Path.REORDERED: "gathered so that each block is read into its place",
}


def explain_choice(plan: Plan) -> str:
    """One sentence, without its full stop."""
    if not plan.num_bytes:
        return "there is nothing to read"
    slower = sorted(plan.paths.items(), key=lambda one: one[1].seconds)
    others = ", ".join(
        f"{path} would take {time_text(one.seconds)} with {_reads(one)}"
        for path, one in slower
        if path is not plan.chosen
    )
    others = f"; {others}" if others else ""
    if plan.request.path is not None:
        return f"asked for with --path{others}"
    only = "it is the only path that this handoff can take"
    start = "predicted to be the fastest" if others else only
    chosen = plan.paths[plan.chosen]
    return f"{start}: {_reads(chosen)} on average, {HOW[plan.chosen]}{others}"


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


def _reads(path: PathPlan) -> str:
    count = path.num_descriptors
    return f"{count:,} READ{'' if count == 1 else 's'} of {bytes_text(path.mean_bytes)}"
