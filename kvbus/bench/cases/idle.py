"""What the agents cost while nothing happens: engines attached, peers warm, no request.

Refuses to count the calm-down after the last handoff.
"""

import anyio

from kvbus.bench.effort import Effort
from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure, Target
from kvbus.bench.shapes import SMALL, contiguous

CASE = "idle"
CALM_S = 1.0
DURATION_S = 20.0
OF_A_CORE = Target(1.0)


async def measure_idle(bench: Bench, effort: Effort) -> list[Figure]:
    """CPU time of the agents over a while without work."""
    duration_s = effort.seconds(DURATION_S)
    async with bench.engines(SMALL, 2) as pair:
        await pair.verify(contiguous(1))
        await anyio.sleep(CALM_S)
        before = bench.cpu_s()
        await anyio.sleep(duration_s)
        after = bench.cpu_s()
    return [
        Figure(
            CASE,
            f"{name} CPU",
            (after[name] - before[name]) / duration_s * 100,
            "% of a core",
            OF_A_CORE,
        )
        for name in ("prefill agent", "decode agent")
    ]
