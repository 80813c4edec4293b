"""Memory of the fake driver: its ranges, what is in use on a GPU, and pinned memory of the host."""

import ctypes
import mmap
import os
import signal
from ctypes import c_int, c_size_t, c_uint, c_uint64

from tests.support.cuda.apart import WITHIN_S, Beside, apart, until
from tests.support.cuda.calls import PAGE, Cuda, refused

INVALID_VALUE, OUT_OF_MEMORY, NOT_FOUND = 1, 2, 500
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
MEMORY_TYPE, BUFFER_ID, ORDINAL, IPC_CAPABLE = 2, 7, 9, 10
RANGE_START, RANGE_SIZE, HANDLE_TYPES, MAPPING_SIZE, MAPPING_BASE = 11, 12, 14, 18, 19
READ_ONLY = 8
MANY = 1 << 30


@apart()
def test_an_address_tells_its_allocation_until_it_is_freed(cuda: Cuda) -> None:
    cuda.start()
    at, other = cuda.alloc(5000), cuda.alloc(5000)

    assert cuda.range_of(at + 4999) == (at, 5000)
    found = [cuda.attribute(c_int, kind, at + 7) for kind in (MEMORY_TYPE, ORDINAL, IPC_CAPABLE)]
    assert found == [2, 0, 1]
    assert cuda.attribute(c_uint64, RANGE_START, at + 7) == at
    assert cuda.attribute(c_size_t, RANGE_SIZE, at + 7) == 5000
    assert cuda.attribute(c_uint64, BUFFER_ID, at) != cuda.attribute(c_uint64, BUFFER_ID, other)
    cuda.cuMemFree_v2(at)
    with refused(NOT_FOUND):
        cuda.range_of(at)
    with refused(INVALID_VALUE):
        cuda.attribute(c_int, MEMORY_TYPE, at)
    with refused(INVALID_VALUE):
        cuda.read(at, 1)


@apart(only_fake=True)
def test_new_memory_is_not_zero(cuda: Cuda) -> None:
    cuda.start()
    assert 0 not in cuda.read(cuda.alloc(5000), 5000)


@apart()
def test_mapped_memory_tells_its_reservation_and_its_mapping(cuda: Cuda) -> None:
    cuda.start()
    at, handles = cuda.reserve(4 * PAGE), [cuda.create(size) for size in (PAGE, 2 * PAGE)]
    cuda.map(at, PAGE, handles[0])
    cuda.map(at + PAGE, 2 * PAGE, handles[1])
    cuda.set_access(at, 3 * PAGE)

    inside = at + 2 * PAGE + 5
    assert cuda.attribute(c_uint64, RANGE_START, inside) == at
    assert cuda.attribute(c_size_t, RANGE_SIZE, inside) == 4 * PAGE
    assert cuda.attribute(c_uint64, MAPPING_BASE, inside) == at + PAGE
    assert cuda.attribute(c_size_t, MAPPING_SIZE, inside) == 2 * PAGE
    assert cuda.range_of(inside) == (at + PAGE, 2 * PAGE)
    assert cuda.attribute(c_uint64, HANDLE_TYPES, inside) == 1
    assert cuda.attribute(c_int, IPC_CAPABLE, inside) == 0
    with refused(INVALID_VALUE):
        cuda.attribute(c_int, MEMORY_TYPE, at + 3 * PAGE)


def holder(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    other.receive()
    cuda.alloc(MANY)
    other.send(os.getpid())
    other.has_ended(WITHIN_S)


@apart(holder)
def test_memory_of_a_killed_process_is_free_again(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    before = cuda.free_bytes()
    other.send("allocate")
    pid = other.receive()

    assert cuda.free_bytes() <= before - MANY
    os.kill(pid, signal.SIGKILL)
    until(lambda: cuda.free_bytes() == before)


@apart(holder, memory=MANY + PAGE)
def test_a_full_gpu_refuses_more_to_all_processes(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    other.send("allocate")
    other.receive()
    cuda.alloc(PAGE)
    for refuse in (cuda.alloc, cuda.create):
        with refused(OUT_OF_MEMORY):
            refuse(PAGE)


@apart()
def test_host_memory_is_registered_once_and_where_it_is_mapped(cuda: Cuda) -> None:
    cuda.start()
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))

    def register(first: int, pages: int) -> None:
        first = at + first * mmap.PAGESIZE
        cuda.cuMemHostRegister_v2(first, pages * mmap.PAGESIZE, c_uint(0))

    register(1, 2)
    found = cuda.get(c_uint64, "cuMemHostGetDevicePointer_v2", at + mmap.PAGESIZE + 8, c_uint(0))
    assert found == at + mmap.PAGESIZE + 8
    assert cuda.attribute(c_int, MEMORY_TYPE, at + mmap.PAGESIZE) == 1
    with refused(ALREADY_REGISTERED):
        register(2, 2)
    with refused(INVALID_VALUE):
        cuda.attribute(c_int, MEMORY_TYPE, at)
    cuda.cuMemHostUnregister(at + mmap.PAGESIZE)
    with refused(NOT_REGISTERED):
        cuda.cuMemHostUnregister(at + mmap.PAGESIZE)
    register(2, 2)


@apart(only_fake=True)
def test_host_memory_that_is_not_there_or_not_writable_is_refused(cuda: Cuda) -> None:
    cuda.start()
    file = os.memfd_create("sealed")
    os.ftruncate(file, mmap.PAGESIZE)
    mapped = ctypes.CDLL(None).mmap
    mapped.restype = ctypes.c_uint64
    at = mapped(None, c_size_t(mmap.PAGESIZE), mmap.PROT_READ, mmap.MAP_SHARED, file, c_size_t(0))
    with refused(INVALID_VALUE):
        cuda.cuMemHostRegister_v2(at, mmap.PAGESIZE, c_uint(0))
    cuda.cuMemHostRegister_v2(at, mmap.PAGESIZE, c_uint(READ_ONLY))
    with refused(INVALID_VALUE):
        cuda.cuMemHostRegister_v2(mmap.PAGESIZE, mmap.PAGESIZE, c_uint(READ_ONLY))
