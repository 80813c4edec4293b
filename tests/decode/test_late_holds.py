"""A fetch whose route is known, but whose peer cannot be held at first, as all places are taken."""

import pytest

from kvbus_decode.agent import DecodeService
from kvbus_decode.peer.directory import PeerAddress
from kvbus_decode.peer.lease_client import LeaseClient
from tests.agents import until
from tests.decode.lent import Neighbours, neighbours
from tests.engines import works

pytestmark = pytest.mark.anyio

NUM_TOKENS = 40


def leases_of(both: Neighbours) -> LeaseClient:
    service = both.decode.service
    assert isinstance(service, DecodeService)
    return service._leases


def leave_the_peer(both: Neighbours) -> None:
    """Its place is free for others, and the route to it is known still."""
    (peer,) = leases_of(both).peers._peers.values()
    routes = dict(both.routes._routes)
    leases_of(both).peers._drop(peer)
    both.routes._routes.update(routes)


@pytest.mark.parametrize(
    ("optimistic", "first_token"),
    [(False, 0), (True, NUM_TOKENS)],
    ids=["that claims first", "that has only to take"],
)
async def test_a_fetch_is_tried_again_once_there_is_a_place(folder, optimistic, first_token):
    settings = {"max_peers": 1, "optimistic": optimistic}
    async with neighbours(folder, decode=settings) as both, both.engines() as (source, target):
        assert await works(source, target)
        leave_the_peer(both)
        leases = leases_of(both)
        other = leases.peers.acquire(PeerAddress("tcp://127.0.0.1:9"))
        theirs = source.some_blocks(3, NUM_TOKENS)
        ours = {} if first_token else target.some_blocks(4, NUM_TOKENS)
        offer = await source.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=theirs)

        fetch = target.decode.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, first_token=first_token, block_ids=ours
        )
        await until(lambda: [one for one in leases.active.values() if not one.peers])
        leases.peers.release(other)
        fetched = await fetch.completed()

        assert (fetched.num_bytes == 0) == (first_token == NUM_TOKENS)
        await offer.released()
        assert not leases.active
