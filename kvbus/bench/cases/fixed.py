"""What a handoff costs when there is next to nothing to move, and where that time goes.

Refuses cold peers: the handshake was before.
"""

from kvbus.bench.cases.stages import stage_figures
from kvbus.bench.effort import Effort
from kvbus.bench.engines import Bench, Handoff
from kvbus.bench.figures import Figure, Target
from kvbus.bench.shapes import SMALL, contiguous
from kvbus.bench.spread import quantile

CASE = "fixed"
NUM_HANDOFFS = 1000


async def measure_fixed(bench: Bench, effort: Effort) -> list[Figure]:
    """One block at a time, each after the one before was released."""
    tables = contiguous(1)
    handoffs: list[Handoff] = []
    released_s: list[float] = []
    async with bench.engines(SMALL, 2) as pair:
        await pair.verify(tables)
        for _ in range(effort.count(NUM_HANDOFFS)):
            handoffs.append(await pair.hand_off(tables))
            released_s += await pair.settle()
    seconds = [handoff.seconds for handoff in handoffs]
    return [
        Figure(CASE, "handoff p50", quantile(seconds, 0.5) * 1e3, "ms", Target(2.0)),
        Figure(CASE, "handoff p99", quantile(seconds, 0.99) * 1e3, "ms"),
        *stage_figures(CASE, handoffs),
        Figure(CASE, "offer to released p50", quantile(released_s, 0.5) * 1e3, "ms"),
        Figure(CASE, "offer to released p99", quantile(released_s, 0.99) * 1e3, "ms"),
        Figure(CASE, "handoffs", len(handoffs), ""),
    ]
