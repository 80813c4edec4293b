"""A scorer for routers: queries decode agents for the cost of a handoff, and names the best pair.

    python examples/cost_scorer.py 4096 --prefill tcp://P1:7701 --prefill tcp://P2:7701 \
        --decode tcp://D1:7711 --decode tcp://D2:7711

The agent replies in less than a millisecond. So a router can send a query for each request, for the
pairs whose prefill agent has the prefix.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import anyio
import typer

from kvbus.bus import call_agent
from kvbus.errors import KVBusError
from kvbus.protocol.tools import Cost, Predicted

Pair = tuple[str, str]
"""Where a prefill agent is, and where a decode agent is."""


def best(predicted_s: Mapping[Pair, float]) -> Pair:
    """The pair that takes least; the first of those that are equally good."""
    return min(predicted_s, key=lambda pair: predicted_s[pair])


async def ask_all(
    prefill: Iterable[str], decode: Iterable[str], num_tokens: int, *, timeout_s: float = 1.0
) -> dict[Pair, Predicted]:
    """What each pair would take; those that do not answer are left out."""
    answers: dict[Pair, Predicted] = {}

    async def ask(pair: Pair) -> None:
        try:
            question = Cost(endpoint=pair[0], num_tokens=num_tokens)
            answers[pair] = await call_agent(pair[1], question, timeout_s=timeout_s)
        except KVBusError as error:
            typer.echo(f"{pair[1]}: {error.message}", err=True)

    async with anyio.create_task_group() as tasks:
        for pair in [(one, other) for one in prefill for other in decode]:
            tasks.start_soon(ask, pair)
    return answers


def main(
    num_tokens: int,
    prefill: Annotated[list[str], typer.Option(help="Prefill agents, tcp://HOST:PORT.")],
    decode: Annotated[list[str], typer.Option(help="Decode agents, tcp://HOST:PORT.")],
) -> None:
    """Name the best pair of agents for a request, with what each would take."""
    answers = anyio.run(ask_all, prefill, decode, num_tokens)
    if not answers:
        raise SystemExit("nobody answered")
    for pair, told in sorted(answers.items(), key=lambda one: one[1].predicted_s):
        known = f"{told.num_observed} handoffs known" if told.path else "never met"
        typer.echo(f"{pair[0]} to {pair[1]}: {told.predicted_s * 1e3:.1f} ms ({known})")
    prefill_at, decode_at = best({pair: told.predicted_s for pair, told in answers.items()})
    typer.echo(f"best: prefill at {prefill_at}, decode at {decode_at}")


if __name__ == "__main__":
    typer.run(main)
