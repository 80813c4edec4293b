"""The thread: when it works, when it sleeps, how it tells, and how it ends."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from kvbus.errors import ClosedError, SegmentError
from kvbus.transport import CloseReport, ReadOutcome, ReadStatus, Transport
from tests.transport.conftest import StartPeer, StartReader, until


def test_progress_is_driven_while_demanded_and_not_otherwise(start_reader: StartReader) -> None:
    transport = start_reader().transport

    with transport.hold_progress(), transport.hold_progress() as second:
        demands = transport.stats().progress_tokens
        second.close()
        second.close()
        left = transport.stats().progress_tokens
        until(lambda: transport.stats().progress_calls > 100)
    transport.metadata().result(20)  # the thread has passed its last pause
    passes = transport.stats().progress_calls
    for _ in range(50):
        transport.metadata().result(20)

    assert (demands, left) == (2, 1)
    assert transport.stats().progress_tokens == 0
    assert transport.stats().progress_calls == passes


def test_memory_is_counted_until_it_is_given_back(start_reader: StartReader) -> None:
    reader = start_reader()
    reader.allocate(8192)

    during = reader.transport.stats().registered_bytes
    reader.transport.deregister(reader.registration).result(20)

    assert during == 8192
    assert reader.transport.stats().registered_bytes == 0


def test_a_clean_close_leaves_nothing_and_refuses_what_follows(start_reader: StartReader) -> None:
    reader = start_reader()
    reader.allocate(8192)

    report = reader.transport.close(timeout_s=5).result(20)

    assert report == CloseReport(num_handles=0, num_registrations=0)
    with pytest.raises(ClosedError):
        reader.transport.metadata()
    with pytest.raises(ClosedError):
        reader.start("peer", 0, [(0, 0, 1)])
    with pytest.raises(ClosedError):
        reader.transport.close(timeout_s=5)
    reader.transport.hold_progress().close()


def test_a_transport_that_was_not_started_refuses_reads() -> None:
    transport = Transport("never/started")

    with pytest.raises(ClosedError):
        transport.read(
            "peer", np.zeros((0, 3), np.uint64), np.zeros((0, 3), np.uint64), on_end=print
        )


def test_memory_that_was_registered_before_nixl_is_open_is_read_into_afterwards(
    start_peer: StartPeer,
) -> None:
    peer = start_peer("peer/1")
    address, metadata = peer.allocate(4096, seed=1)
    memory, ended = np.zeros(4096, np.uint8), Future[ReadStatus]()
    transport = Transport("opens/later")
    transport.start(opens=False).result(20)
    own, given_back = (
        transport.register(memory.ctypes.data, 4096).result(20),
        transport.register(memory.ctypes.data, 64).result(20),
    )
    transport.deregister(given_back).result(20)
    refused = transport.add_peer(metadata)
    with pytest.raises(ClosedError):
        refused.result(20)
    was_open = transport.is_open

    transport.open().result(20)
    transport.open().result(20)
    rows = [np.array([[at, 4096, 0]], np.uint64) for at in (memory.ctypes.data, address)]
    name = transport.add_peer(metadata).result(20)
    transport.read(name, *rows, on_end=lambda outcome: ended.set_result(outcome.status))

    assert (was_open, transport.is_open) == (False, True)
    assert ended.result(20) is ReadStatus.DONE
    assert memory.any()
    assert transport.metadata([own]).result(20)
    transport.deregister(own).result(20)
    assert transport.close(timeout_s=5).result(20) == CloseReport(
        num_handles=0, num_registrations=0
    )


def test_a_transport_that_was_never_open_gives_back_what_was_registered() -> None:
    transport = Transport("opens/never")
    transport.start(opens=False).result(20)
    memory = np.zeros(4096, np.uint8)
    transport.register(memory.ctypes.data, 4096).result(20)

    assert transport.close(timeout_s=5).result(20) == CloseReport(
        num_handles=0, num_registrations=0
    )


def test_memory_that_does_not_exist_cannot_be_registered(start_reader: StartReader) -> None:
    transport = start_reader().transport

    with pytest.raises(SegmentError):
        transport.register(0, 4096)
    with pytest.raises(SegmentError):
        transport.register(4096, 0)


def test_callbacks_run_on_the_event_loop_and_one_that_raises_stops_none(
    start_peer: StartPeer,
) -> None:
    peer = start_peer("peer/1")
    address, metadata = peer.allocate(4096, seed=1)

    async def read_some() -> tuple[list[ReadStatus], list[str]]:
        loop, complaints = asyncio.get_running_loop(), list[str]()
        loop.set_exception_handler(lambda _, context: complaints.append(str(context["exception"])))
        transport = Transport("loop/boot", deliver=loop.call_soon_threadsafe)
        await asyncio.wrap_future(transport.start())
        memory = np.zeros(4096, np.uint8)
        await asyncio.wrap_future(transport.register(memory.ctypes.data, 4096))
        name = await asyncio.wrap_future(transport.add_peer(metadata))
        ended: asyncio.Queue[ReadStatus] = asyncio.Queue()

        def on_end(outcome: ReadOutcome) -> None:
            assert asyncio.get_running_loop() is loop
            ended.put_nowait(outcome.status)

        def broken(_: ReadOutcome) -> None:
            raise ValueError("a broken callback")

        here = np.array([[memory.ctypes.data, 4096, 0]], np.uint64)
        there = np.array([[address, 4096, 0]], np.uint64)
        for callback in (broken, on_end, on_end):
            transport.read(name, here, there, on_end=callback)
        statuses = [await ended.get(), await ended.get()]
        await asyncio.wrap_future(transport.close(timeout_s=5))
        return statuses, complaints

    statuses, complaints = asyncio.run(asyncio.wait_for(read_some(), 20))

    assert statuses == [ReadStatus.DONE, ReadStatus.DONE]
    assert complaints == ["read callbacks failed (1 sub-exception)"]
