"""How far what agents predict of a handoff is from what it takes, with nothing beside it."""

import random
from collections.abc import Mapping

from kvbus.bench.engines import UNMAPPED, Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target
from kvbus.bench.shapes import BIG, scattered
from kvbus.bench.stats import quantile
from kvbus.bus import ask_agent
from kvbus.protocol.status import Cost

NUM_LEARNED, NUM_PREDICTED = 100, 200
MAX_BLOCKS = 256
"""64 MiB; the least is 256 KiB."""
P90_ERROR = Target(0.25)
TIMEOUT_S = 5.0


async def measure_cost(bench: Bench, scale: Scale) -> list[Figure]:
    """Of handoffs of 256 KiB to 64 MiB, in scattered blocks, mapped and not."""
    most, figures = scale.count(MAX_BLOCKS), []
    num_learned, num_predicted = scale.count(NUM_LEARNED), scale.count(NUM_PREDICTED)
    async with (
        bench.engines(BIG, 2 * most) as mapped,
        bench.reader(BIG, 2 * most, mapped.source, agent=bench.other_agent(UNMAPPED)) as unmapped,
    ):
        ways: Mapping[str, EnginePair] = {"mapped": mapped, UNMAPPED: unmapped}
        errors: dict[str, list[float]] = {way: [] for way in ways}
        chance = random.Random(1)  # noqa: S311 - no secret
        for number in range(num_learned + num_predicted):
            num_blocks = round(most ** chance.random())
            for way, pair in ways.items():
                error = await _error(pair, num_blocks, seed=number)
                if number >= num_learned:
                    errors[way].append(error)
    for way, found in errors.items():
        figures += [
            Figure(f"{way}: p50 of the error", quantile(found, 0.5)),
            Figure(f"{way}: p90 of the error", quantile(found, 0.9), target=P90_ERROR),
        ]
    return figures


async def _error(pair: EnginePair, num_blocks: int, *, seed: int) -> float:
    """Of one handoff, as a part of what it took by the decode agent's clock."""
    tables = scattered(num_blocks, BIG, seed=seed)
    (ticket,) = await pair.source.offer(tables)
    asked = Cost(
        endpoint=ticket["endpoint"],
        num_tokens=tables.num_tokens,
        prefill_engine=ticket["engine_id"],
        decode_engine=pair.session.engine.engine_id,
    )
    endpoint = pair.session.agent.peer_endpoint
    predicted = await ask_agent(endpoint, asked, timeout_s=TIMEOUT_S)
    stages = (await pair.fetch(ticket, tables)).fetched.stages_s
    await pair.source.ended()
    took_s = stages.queued + stages.claiming + stages.reading + stages.taking
    return abs(predicted.predicted_s - took_s) / took_s
