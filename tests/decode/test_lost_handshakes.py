"""What goes while hands are shaken leaves no route behind: nothing would say again that it went."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvbus_decode.agent import DecodeService
from kvbus_decode.peer.mapped_memory import MappedMemory
from tests.agents import until
from tests.decode.lent import Neighbours, neighbours
from tests.engines import works

pytestmark = pytest.mark.anyio


async def drop_the_peer(both: Neighbours, _: MappedMemory) -> None:
    service = both.decode.service
    assert isinstance(service, DecodeService)
    directory = service._leases.peers
    (peer,) = directory._peers.values()
    directory._drop(peer)


async def end_the_memory(_: Neighbours, memory: MappedMemory) -> None:
    memory.hang_up()
    await until(lambda: memory.closed)


def when_mapped(
    both: Neighbours, happens: Callable[[Neighbours, MappedMemory], Awaitable[None]]
) -> list[Any]:
    """Have something happen once, in the middle of a handshake; what was mapped by then."""
    borrower, seen = both.routes.borrower, []
    borrow = borrower.borrow

    async def borrow_and_go_on(*args: Any, **more: Any) -> MappedMemory | str:
        memory = await borrow(*args, **more)
        assert isinstance(memory, MappedMemory)
        if not seen:
            await happens(both, memory)
        seen.append(memory)
        return memory

    borrower.borrow = borrow_and_go_on  # type: ignore[method-assign]  # it lasts until then
    return seen


@pytest.mark.parametrize("happens", [drop_the_peer, end_the_memory])
async def test_no_route_is_kept_whose_source_went_during_its_handshake(folder, happens):
    async with neighbours(folder) as both, both.engines() as (source, target):
        seen = when_mapped(both, happens)
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [3]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [3]})
        await until(lambda: fetch.notice)
        kept = both.mapped

        assert kept == []
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)
        assert both.mapped == [seen[1]]
        assert seen[1].is_open


async def test_no_route_is_kept_into_an_engine_that_went_during_its_handshake(folder):
    async with neighbours(folder) as both, both.engines() as (source, target):
        (engine,) = both.decode.agent.engines.engines.values()

        async def lose_the_engine(both: Neighbours, _: MappedMemory) -> None:
            engine.lost = True  # its memory goes a little later
            both.decode.service.on_engine_lost(engine)

        seen = when_mapped(both, lose_the_engine)
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [3]})
        target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [3]})
        await until(lambda: seen and not both.routes._shaking)
        kept = both.mapped

        assert kept == []
        engine.lost = False  # it leaves now
        await offer.withdraw()
        await offer.released()
