"""Where the time of handoffs goes, stage by stage.

Refuses clocks of its own: the decode agent timed the stages, the engine the whole.
"""

from collections.abc import Sequence
from statistics import median

from kvbus.bench.engines import Handoff
from kvbus.bench.figures import Figure

STAGES = ("resolving", "claiming", "waiting", "reading", "confirming")


def stage_figures(case: str, handoffs: Sequence[Handoff]) -> list[Figure]:
    """Medians of each stage; what no stage has is between engine and agent."""
    by_stage = {
        stage: [getattr(handoff.fetched.stages_s, stage) for handoff in handoffs]
        for stage in STAGES
    }
    inside = [sum(times) for times in zip(*by_stage.values(), strict=True)]
    outside = [handoff.seconds - spent for handoff, spent in zip(handoffs, inside, strict=True)]
    rows = {**by_stage, "engine to agent": outside}
    return [
        Figure(case, f"  {name} p50", median(times) * 1e3, "ms") for name, times in rows.items()
    ]
