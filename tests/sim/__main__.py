"""Simulates handoffs and says what became of them: ``make simulate SEED=1 HANDOFFS=1000000``.

Ends with 1 when something happened that must not, after saying what, when, and how to see it again.
"""

import gc
import time
import traceback
from collections import Counter
from typing import Annotated

import typer

from tests.sim.world import Violation
from tests.sim.worlds import SORTS, simulate
from tests.support.moves import enforce_all

ROUND = 2000
"""Handoffs of one world; the next one has another seed."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    seed: Annotated[int, typer.Option(help="What all of it is drawn from.")] = 1,
    handoffs: Annotated[int, typer.Option(min=1, help="Requests, over all worlds.")] = 10_000,
    world: Annotated[str, typer.Option(help=f"all, or one of {', '.join(SORTS)}.")] = "all",
) -> None:
    """Simulate handoffs between agents in worlds of many seeds, and check bytes and ends."""
    enforce_all()
    names = list(SORTS) if world == "all" else [world]
    began = time.process_time()
    counts = {name: Counter[str]() for name in names}
    done = number = 0
    while done < handoffs:
        name, size = names[number % len(names)], min(ROUND, handoffs - done)
        try:
            cluster = simulate(SORTS[name], seed=seed + number, num_handoffs=size)
        except Violation as violation:
            typer.echo("".join(traceback.format_exception(violation)), err=True)
            again = f"--world {name} --seed {seed + number} --handoffs {size}"
            typer.echo(f"again: PYTHONHASHSEED=0 python -m tests.sim {again}", err=True)
            raise typer.Exit(1) from violation
        counts[name] += cluster.ledger.ends + cluster.faults
        counts[name]["breaks"] += cluster.network.num_breaks
        counts[name]["virtual seconds"] += round(cluster.world.now)
        done += size
        number += 1
        del cluster
        gc.collect()
    for name, counted in counts.items():
        typer.echo(f"{name}: {', '.join(f'{one} {what}' for what, one in counted.most_common())}")
    spent_s = time.process_time() - began
    typer.echo(f"{done} handoffs, 0 violations, {spent_s:.0f} s of one core")


if __name__ == "__main__":
    app()
