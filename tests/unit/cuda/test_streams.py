"""Streams of the fake driver run later, in order, and await each other where CUDA's do."""

import ctypes
import time
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path
from threading import Timer

from tests.support.cuda.apart import apart, until
from tests.support.cuda.calls import PAGE, CopyAttributes, Cuda, Location, refused

INVALID_VALUE, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 1, 400, 600, 700
BLOCKING = 0
SIZE = 4096


class Gate:
    """Holds a stream until it is opened, as a long kernel does."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.word = c_uint64()
        self._at = ctypes.addressof(self.word)
        cuda.cuMemHostRegister_v2(self._at, 8, c_uint(0))

    def hold(self, stream: c_void_p) -> None:
        self._cuda.cuStreamWaitValue64_v2(stream, self._at, 1, c_uint(0))

    def open(self) -> None:
        self.word.value = 1


def is_busy(cuda: Cuda, stream: c_void_p | None) -> bool:
    code = cuda.library.cuStreamQuery(stream)
    assert code in (0, NOT_READY)
    return bool(code == NOT_READY)


def pinned(cuda: Cuda, content: bytes) -> "ctypes.Array[c_ubyte]":
    made = (c_ubyte * len(content)).from_buffer_copy(content)
    cuda.cuMemHostRegister_v2(ctypes.addressof(made), len(content), c_uint(0))
    return made


@apart()
def test_work_of_a_stream_runs_later_and_in_order(cuda: Cuda) -> None:
    cuda.start()
    gate, stream, at, done = Gate(cuda), cuda.stream(), cuda.alloc(SIZE), pinned(cuda, bytes(8))
    word = ctypes.addressof(done)
    cuda.write(at, b"a" * SIZE)
    gate.hold(stream)
    cuda.cuMemsetD8Async(at, c_ubyte(ord("b")), SIZE, stream)
    cuda.cuMemsetD8Async(at, c_ubyte(ord("c")), SIZE // 2, stream)
    cuda.cuStreamWriteValue64_v2(stream, word, 77, c_uint(0))

    assert is_busy(cuda, stream)
    assert cuda.read(at, SIZE) == b"a" * SIZE, "the legacy stream does not await this one"
    assert not any(done)
    gate.open()
    until(lambda: bytes(done) == (77).to_bytes(8, "little"))
    assert cuda.read(at, SIZE) == b"c" * (SIZE // 2) + b"b" * (SIZE // 2)
    assert not is_busy(cuda, stream)


@apart()
def test_blocking_streams_and_the_legacy_stream_await_each_other(cuda: Cuda) -> None:
    cuda.start()
    gate, at = Gate(cuda), cuda.alloc(SIZE)
    first, second = cuda.stream(BLOCKING), cuda.stream(BLOCKING)
    gate.hold(first)
    cuda.cuMemsetD8Async(at, c_ubyte(1), SIZE, first)
    cuda.cuMemsetD8Async(at, c_ubyte(2), SIZE // 2, None)
    cuda.cuMemsetD8Async(at, c_ubyte(3), SIZE // 4, second)
    gate.open()
    cuda.cuCtxSynchronize()

    assert cuda.read(at, SIZE) == b"\3" * (SIZE // 4) + b"\2" * (SIZE // 4) + b"\1" * (SIZE // 2)


@apart()
def test_pinned_memory_is_read_when_its_turn_comes(cuda: Cuda) -> None:
    cuda.start()
    gate, stream, at = Gate(cuda), cuda.stream(), cuda.alloc(2 * SIZE)
    pageable = (c_ubyte * SIZE).from_buffer_copy(b"a" * SIZE)
    locked = pinned(cuda, b"a" * SIZE)
    gate.hold(stream)
    for to, memory in ((at, pageable), (at + SIZE, locked)):
        cuda.cuMemcpyHtoDAsync_v2(to, ctypes.addressof(memory), SIZE, stream)
        ctypes.memset(memory, ord("b"), SIZE)
    gate.open()
    cuda.cuStreamSynchronize(stream)

    assert cuda.read(at, 2 * SIZE) == b"a" * SIZE + b"b" * SIZE


@apart()
def test_an_event_is_done_once_what_was_recorded_is(cuda: Cuda) -> None:
    cuda.start()
    gate, stream, other, event = Gate(cuda), cuda.stream(), cuda.stream(), c_void_p()
    cuda.cuEventCreate(byref(event), c_uint(0))
    gate.hold(stream)
    cuda.cuEventRecord(event, stream)
    cuda.cuStreamWaitEvent(other, event, c_uint(0))

    with refused(NOT_READY):
        cuda.cuEventQuery(event)
    assert is_busy(cuda, other)
    gate.open()
    cuda.cuStreamSynchronize(other)
    cuda.cuEventQuery(event)


@apart()
def test_memory_is_freed_once_the_work_of_its_context_is_done(cuda: Cuda) -> None:
    cuda.start()
    gate, stream, at, to = Gate(cuda), cuda.stream(), cuda.alloc(SIZE), cuda.alloc(SIZE)
    cuda.write(at, b"a" * SIZE)
    gate.hold(stream)
    cuda.cuMemcpyAsync(to, at, SIZE, stream)
    Timer(0.1, gate.open).start()
    cuda.cuMemFree_v2(at)

    assert not is_busy(cuda, stream)
    assert cuda.read(to, SIZE) == b"a" * SIZE


@apart(only_fake=True)
def test_memory_that_is_gone_when_a_copy_runs_loses_the_context(cuda: Cuda) -> None:
    cuda.start()
    gate, stream, at, to = Gate(cuda), cuda.stream(), cuda.map_new(PAGE), cuda.alloc(PAGE)
    gate.hold(stream)
    cuda.cuMemcpyAsync(to, at, PAGE, stream)
    cuda.cuMemUnmap(at, PAGE)
    gate.open()

    for call in (lambda: cuda.cuStreamSynchronize(stream), cuda.stream, cuda.cuCtxSynchronize):
        with refused(ILLEGAL_ADDRESS):
            call()
    with cuda.on(1):
        cuda.alloc(PAGE)


@apart()
def test_a_copy_beyond_an_allocation_is_refused(cuda: Cuda) -> None:
    cuda.start()
    stream, at, to = cuda.stream(), cuda.alloc(PAGE), cuda.alloc(2 * PAGE)
    with refused(INVALID_VALUE):
        cuda.cuMemcpyAsync(to, at, PAGE + 1, stream)
    with refused(INVALID_VALUE):
        cuda.cuStreamWriteValue64_v2(stream, at + 4, 1, c_uint(0))


def copy_batch(cuda: Cuda, copies: list[tuple[int, int]], stream: c_void_p | None) -> None:
    to, source = ((c_uint64 * len(copies))(*ends) for ends in zip(*copies, strict=True))
    sizes = (c_size_t * len(copies))(*[SIZE] * len(copies))
    wanted = CopyAttributes(1, Location(), Location(), 0)
    firsts = c_size_t(0)
    given = byref(to), byref(source), byref(sizes), len(copies), byref(wanted), byref(firsts), 1
    cuda.cuMemcpyBatchAsync_v2(*given, stream)


@apart(only_fake=True)
def test_copies_of_a_batch_run_in_any_order(cuda: Cuda) -> None:
    cuda.start()
    stream, places = cuda.stream(), [cuda.alloc(SIZE) for _ in range(3)]
    for number, at in enumerate(places):
        cuda.write(at, bytes([number]) * SIZE)
    copy_batch(cuda, [(places[1], places[0]), (places[2], places[1])], stream)
    cuda.cuStreamSynchronize(stream)

    assert cuda.read(places[1], SIZE) == bytes(SIZE)
    assert cuda.read(places[2], SIZE) == b"\1" * SIZE
    with refused(INVALID_VALUE):
        copy_batch(cuda, [(places[1], places[0])], None)


@apart(old_driver=True)
def test_an_old_driver_has_no_batches(cuda: Cuda) -> None:
    cuda.start()
    assert not hasattr(cuda.library, "cuMemcpyBatchAsync_v2")
    assert not hasattr(cuda.library, "cuMemcpyBatchAsync")
    assert cuda.get(ctypes.c_int, "cuDriverGetVersion") == 12020


@apart(only_fake=True)
def test_a_delay_holds_its_stream(cuda: Cuda) -> None:
    cuda.start()
    stream, other = cuda.stream(), cuda.stream()
    before = time.monotonic()
    cuda.fake_cuda_delay(stream, c_uint(100))
    cuda.cuStreamSynchronize(other)
    assert time.monotonic() < before + 0.1
    cuda.cuStreamSynchronize(stream)
    assert time.monotonic() >= before + 0.1


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@apart(only_fake=True)
def test_a_destroyed_stream_ends_its_work_and_its_thread(cuda: Cuda) -> None:
    cuda.start()
    gate, at = Gate(cuda), cuda.alloc(SIZE)
    cuda.write(at, bytes(SIZE))
    before, stream = num_threads(), cuda.stream()
    gate.hold(stream)
    cuda.cuMemsetD8Async(at, c_ubyte(1), SIZE, stream)
    cuda.cuStreamDestroy_v2(stream)
    gate.open()

    until(lambda: cuda.read(at, SIZE) == b"\1" * SIZE)
    until(lambda: num_threads() == before)
