"""What is known of agents that were silent, by where they are."""

import asyncio
from dataclasses import dataclass

import pytest

from kvbus.errors import ErrorCode, RemoteError
from kvbus_decode.peer.reach import NUM_TIMEOUTS
from kvbus_decode.peer.reach_book import LEAST_S, ReachBook

pytestmark = pytest.mark.anyio
WHERE = "tcp://10.0.0.1:5750"


@dataclass
class Connection:
    """What a connection knows of its other side."""

    peer_boot: str | None
    heard_at: float


@pytest.fixture(params=["a", None], ids=["met before", "never met"])
async def silent(request: pytest.FixtureRequest) -> tuple[ReachBook, Connection]:
    """An agent whose process ``a`` does not answer."""
    loop = asyncio.get_running_loop()
    connection = Connection(request.param, heard_at=loop.time() - 100)
    book = ReachBook(loop, max_known=4)
    for _ in range(NUM_TIMEOUTS):
        assert book.admit(WHERE, connection, WHERE, "a")
        book.note_timeout(WHERE, connection, loop.time() - LEAST_S, WHERE)
    with pytest.raises(RemoteError):
        book.admit(WHERE, connection, WHERE, "a")
    return book, connection


async def test_fetches_that_are_refused_count_until_the_agent_is_heard(
    silent: tuple[ReachBook, Connection],
) -> None:
    book, connection = silent
    with pytest.raises(RemoteError):
        book.admit(WHERE, connection, WHERE, "a")
    before = book.num_refused
    connection.peer_boot, connection.heard_at = "a", asyncio.get_running_loop().time()

    assert book.retry_s(WHERE, connection) is None
    assert (before, book.num_refused) == (2, 0)


async def test_a_ticket_of_a_new_process_of_a_silent_agent_is_read_at_once(
    silent: tuple[ReachBook, Connection],
) -> None:
    book, connection = silent

    answers = book.admit(WHERE, connection, WHERE, "b")

    assert answers
    assert book.retry_s(WHERE, connection) is None


async def test_a_new_process_that_is_silent_too_is_not_asked_for_ever(
    silent: tuple[ReachBook, Connection],
) -> None:
    book, connection = silent
    loop = asyncio.get_running_loop()

    for _ in range(NUM_TIMEOUTS):
        assert book.admit(WHERE, connection, WHERE, "b")
        book.note_timeout(WHERE, connection, loop.time() - LEAST_S, WHERE)

    with pytest.raises(RemoteError) as refused:
        book.admit(WHERE, connection, WHERE, "b")
    assert refused.value.code is ErrorCode.PEER_UNREACHABLE


async def test_a_request_that_names_no_process_waits(silent: tuple[ReachBook, Connection]) -> None:
    book, connection = silent

    with pytest.raises(RemoteError):
        book.admit(WHERE, connection, WHERE, None)
