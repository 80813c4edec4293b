"""The decode agent's slots: all are used, and no peer can keep the others from having any."""

import asyncio
from random import Random
from types import SimpleNamespace

import pytest

from kvbus_decode.read.slot_ring import SlotRing

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The ring hands out asyncio futures."""
    return "asyncio"


def ring_of(num_slots: int) -> SlotRing:
    """A ring without the memory."""
    return SlotRing(SimpleNamespace(num_slots=num_slots))


def given(futures: list["asyncio.Future[int]"]) -> list[int]:
    """The slots of those that have one."""
    return [future.result() for future in futures if future.done()]


@pytest.mark.parametrize(("num_slots", "of_one"), [(1, 1), (2, 1), (3, 2), (4, 2), (16, 8)])
async def test_one_peer_has_half_of_the_slots_at_most(num_slots, of_one):
    ring = ring_of(num_slots)

    taken = given([ring.take("a") for _ in range(40)])

    assert len(set(taken)) == len(taken) == of_one


async def test_each_peer_that_keeps_its_slots_leaves_half_of_the_rest():
    ring = ring_of(16)

    taken = [len(given([ring.take(peer) for _ in range(40)])) for peer in "abcdef"]

    assert taken == [8, 4, 2, 1, 1, 0]


async def test_peers_that_wait_get_slots_in_turn():
    ring = ring_of(2)
    (first,) = given([ring.take("a")])
    (second,) = given([ring.take("b")])
    waiting = {peer: [ring.take(peer) for _ in range(2)] for peer in "ab"}

    ring.give(first)
    ring.give(second)

    assert {peer: len(given(futures)) for peer, futures in waiting.items()} == {"a": 1, "b": 1}


async def test_who_gave_up_waiting_gets_no_slot():
    ring = ring_of(1)
    (slot,) = given([ring.take("a")])
    gone, next_one = ring.take("a"), ring.take("b")
    gone.set_exception(KeyError())

    ring.give(slot)

    assert given([next_one]) == [slot]
    assert isinstance(gone.exception(), KeyError)


@pytest.mark.parametrize("seed", range(20))
async def test_every_slot_has_one_holder_and_all_come_back(seed):
    random, ring = Random(seed), ring_of(5)
    held: list[int] = []
    waiting = [ring.take(random.choice("abc")) for _ in range(60)]

    while waiting or held:
        held += given(waiting)
        waiting = [future for future in waiting if not future.done()]
        assert len(set(held)) == len(held) == ring.num_in_use
        ring.give(held.pop(random.randrange(len(held))))

    assert ring.num_in_use == 0
