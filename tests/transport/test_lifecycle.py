"""The thread: when it works, when it sleeps, how it tells, and how it ends."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from kvbus.errors import ClosedError
from kvbus.transport import ReadOutcome, ReadStatus, Transport
from tests.transport.conftest import WITHIN_S, MakeReader, until

NO_ROWS = np.zeros((0, 3), np.uint64)


def test_progress_is_driven_while_demanded_and_not_otherwise(make_reader: MakeReader) -> None:
    transport = make_reader().transport

    with transport.hold_progress(), transport.hold_progress() as second:
        demands = transport.stats().progress_tokens
        second.close()
        second.close()
        left = transport.stats().progress_tokens
        until(lambda: transport.stats().progress_calls > 100)
    transport.metadata().result(WITHIN_S)  # the thread has passed its last pause
    passes = transport.stats().progress_calls
    for _ in range(50):
        transport.metadata().result(WITHIN_S)

    assert (demands, left) == (2, 1)
    assert transport.stats().progress_tokens == 0
    assert transport.stats().progress_calls == passes


def test_a_clean_close_leaves_nothing_and_refuses_what_follows(make_reader: MakeReader) -> None:
    transport = make_reader(room=8192).transport
    registered_bytes = transport.stats().registered_bytes

    num_handles = transport.close(timeout_s=5).result(WITHIN_S)

    assert registered_bytes == 8192
    assert num_handles == 0
    assert transport.stats().registered_bytes == 0
    for call in (
        transport.metadata,
        lambda: transport.read("peer", NO_ROWS, NO_ROWS, on_end=print),
        lambda: transport.close(timeout_s=5),
        lambda: Transport("never-started").read("peer", NO_ROWS, NO_ROWS, on_end=print),
    ):
        with pytest.raises(ClosedError):
            call()
    transport.hold_progress().close()


def test_memory_that_was_registered_before_nixl_is_open_is_read_into_afterwards_and_given_back(
    make_reader: MakeReader,
) -> None:
    place = make_reader().meet(size_bytes=4096)
    memory, ended = np.zeros(4096, np.uint8), Future[ReadOutcome]()
    transport = Transport("opens-later")
    transport.start(opens=False).result(WITHIN_S)
    own, given_back = [
        transport.register(memory.ctypes.data, size).result(WITHIN_S) for size in (4096, 64)
    ]
    transport.deregister(given_back).result(WITHIN_S)
    with pytest.raises(ClosedError):
        transport.add_peer(place.metadata).result(WITHIN_S)
    was_open = transport.is_open

    for _ in range(2):
        transport.open().result(WITHIN_S)
    rows = [np.array([[at, 4096, 0]], np.uint64) for at in (own.address, place.address)]
    name = transport.add_peer(place.metadata).result(WITHIN_S)
    transport.read(name, *rows, on_end=ended.set_result)
    status = ended.result(WITHIN_S).status
    transport.deregister(own).result(WITHIN_S)

    assert not was_open
    assert status is ReadStatus.DONE
    assert np.array_equal(memory, place.content)
    assert transport.close(timeout_s=5).result(WITHIN_S) == 0
    assert transport.stats().registered_bytes == 0


def test_callbacks_run_on_the_event_loop_and_one_that_raises_stops_none() -> None:
    async def read_some() -> tuple[list[ReadStatus], list[str]]:
        loop, complaints = asyncio.get_running_loop(), list[str]()
        loop.set_exception_handler(lambda _, context: complaints.append(str(context["exception"])))
        transport = Transport("loop-boot", deliver=loop.call_soon_threadsafe)
        await asyncio.wrap_future(transport.start())
        ended: asyncio.Queue[ReadStatus] = asyncio.Queue()

        def on_end(outcome: ReadOutcome) -> None:
            assert asyncio.get_running_loop() is loop
            ended.put_nowait(outcome.status)

        def broken(_: ReadOutcome) -> None:
            raise ValueError("a broken callback")

        for callback in (broken, on_end, on_end):
            transport.read("nobody", *[np.ones((1, 3), np.uint64)] * 2, on_end=callback)
        statuses = [await ended.get(), await ended.get()]
        await asyncio.wrap_future(transport.close(timeout_s=5))
        return statuses, complaints

    statuses, complaints = asyncio.run(asyncio.wait_for(read_some(), WITHIN_S))

    assert statuses == [ReadStatus.FAILED, ReadStatus.FAILED]
    assert complaints == ["a broken callback"]
