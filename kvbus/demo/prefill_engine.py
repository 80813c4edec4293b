"""The demo's prefill engine, a process: computes prompts and offers their KV.

Refuses to reuse the blocks of an offer before the agent says that it is released.
"""

from kvbus.demo.engine import GROUP, Engine, answer, attached_engine, run_engine, serve
from kvbus.demo.generate import encode, prefill_prompt
from kvbus.demo.work import EngineSetup, Failed, Prefill, Prefilled
from kvbus.engine import Offer, PrefillSession
from kvbus.errors import RequestRefused
from kvbus.geometry import num_blocks_for


async def main(setup: EngineSetup) -> None:
    """Attach, and serve until the driver closes the pipe."""
    async with attached_engine(setup, PrefillSession) as (engine, session):

        async def handle(work: Prefill) -> None:
            await prefill(engine, session, work)

        await serve(engine, session.agent.peer_endpoint, Prefill, handle)


async def prefill(engine: Engine, session: PrefillSession, work: Prefill) -> None:
    """One request, from its prompt to the release of its blocks."""
    num_tokens = len(encode(work.prompt))
    block_ids = await engine.pool.take(num_blocks_for(num_tokens, engine.setup.block_size))
    offer = await compute_and_offer(engine, session, work, block_ids)
    if offer is not None:
        await offer.released()
    engine.pool.give(block_ids)


async def compute_and_offer(
    engine: Engine, session: PrefillSession, work: Prefill, block_ids: list[int]
) -> Offer | None:
    """The offer, once the driver has its ticket; None when the agent refused it."""
    prompt = encode(work.prompt)
    step = await engine.compute(
        lambda: prefill_prompt(engine.model, engine.kv, block_ids, prompt=prompt)
    )
    try:
        offer = await session.offer(
            work.request_id, num_tokens=len(prompt), block_ids={GROUP: block_ids}
        )
    except RequestRefused as error:
        answer(Failed(work.request_id, error.code, error.message))
        return None
    answer(Prefilled(work.request_id, step, offer.ticket, len(block_ids)))
    return offer


if __name__ == "__main__":
    run_engine(main)
