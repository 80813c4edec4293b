"""Simulates handoffs and says what became of them: ``make simulate SEED=1 HANDOFFS=1000000``.

Ends with 1 when an invariant does not hold, after saying which, when, and what the offers and
fetches that are concerned have been through. The same arguments replay the same world.
"""

import gc
import time
import traceback
from dataclasses import replace
from typing import Annotated

import typer

from tests.simulator.checker import Violation
from tests.simulator.report import lines
from tests.simulator.settings import WORLDS
from tests.simulator.world import World

app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    seed: Annotated[int, typer.Option(help="What all of it is drawn from.")] = 1,
    handoffs: Annotated[int, typer.Option(min=1, help="Offers that are made.")] = 10_000,
    agents: Annotated[
        int, typer.Option(min=0, help="So many prefill and decode agents. 0: those of the world.")
    ] = 0,
    world: Annotated[str, typer.Option(help=f"One of {', '.join(WORLDS)}.")] = "plain",
    loss: Annotated[
        float, typer.Option(min=-1, max=0.9, help="Share of messages lost. -1: the world's.")
    ] = -1.0,
) -> None:
    """Simulate handoffs between agents, and check every step."""
    settings = WORLDS[world]
    settings = settings if loss < 0 else settings.lossy(loss)
    settings = replace(settings, agents=agents) if agents else settings
    gc.freeze()
    gc.set_threshold(1_000_000)  # hardly anything is garbage that needs a collector
    began = time.process_time()
    simulated = World(settings, seed=seed, num_handoffs=handoffs)
    try:
        simulated.run()
    except Violation as violation:
        typer.echo("".join(traceback.format_exception(violation)), err=True)
        options = f"--world {world} --seed {seed} --handoffs {handoffs} --agents {agents}"
        typer.echo(f"replay: python -m tests.simulator {options} --loss {loss}", err=True)
        raise typer.Exit(1) from violation
    for line in lines(simulated):
        typer.echo(line)
    typer.echo(f"{time.process_time() - began:.0f} s of one core")


if __name__ == "__main__":
    app()
