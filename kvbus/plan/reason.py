"""Why a plan's path was chosen, in words.

Refuses to decide anything.
"""

from kvbus.plan.paths import PathPlan
from kvbus.plan.plan import Plan
from kvbus.plan.shown import shown_bytes, shown_time
from kvbus.planning.fetch_shape import Path


def reason(plan: Plan) -> str:
    """One sentence, without its full stop."""
    chosen = plan.chosen
    if not plan.num_bytes:
        return "there is nothing to read"
    others = [one for one in plan.paths if one is not chosen]
    if plan.request.path is not None:
        return f"asked for with --path{_against(others)}"
    if not others:
        return f"it is the only path that this handoff can take: {_what(chosen)}"
    return f"predicted to be the fastest: {_what(chosen)}{_against(others)}"


def _what(path: PathPlan) -> str:
    reads = f"{_times(path.num_descriptors)} of {shown_bytes(path.mean_bytes)} on average"
    match path.path:
        case Path.DIRECT:
            return f"{reads}, straight from blocks to blocks"
        case Path.PACKED:
            return f"{reads}, one a box, gathered before and scattered after it"
        case Path.REORDERED:
            return f"{reads}, gathered so that each block is read into its place"


def _against(others: list[PathPlan]) -> str:
    shown = [
        f"{one.path} would take {shown_time(one.prediction.seconds)}"
        f" with {_times(one.num_descriptors)} of {shown_bytes(one.mean_bytes)}"
        for one in sorted(others, key=lambda one: one.prediction.seconds)
    ]
    return f"; {', '.join(shown)}" if shown else ""


def _times(count: int) -> str:
    return f"{count:,} READ{'' if count == 1 else 's'}"
