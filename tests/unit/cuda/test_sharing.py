"""Memory of one process in another, by CUDA IPC and by descriptors, on the fake driver."""

import os
import signal
from ctypes import byref, c_int
from pathlib import Path

from tests.support.cuda.apart import WITHIN_S, Beside, apart, until
from tests.support.cuda.calls import PAGE, READ, AllocationProp, Cuda, refused

INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT = 1, 101, 201
INVALID_HANDLE, ILLEGAL_ADDRESS = 400, 700
MEBI = 1 << 20


def lender(cuda: Cuda, other: Beside) -> None:
    """Lends 64 MiB, and frees them when it is told."""
    cuda.start()
    at = cuda.alloc(64 * MEBI)
    cuda.write(at, b"first")
    other.send(os.getpid(), cuda.ipc_handle(at))
    if other.receive() == "free":
        assert cuda.read(at, 5) == b"other"
        cuda.cuMemFree_v2(at)
    other.send(b"")
    other.has_ended(WITHIN_S)


@apart(lender)
def test_memory_by_ipc_lives_until_the_last_process_closes_it(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    _, handle = other.receive()
    lent = cuda.free_bytes()
    at = cuda.open_ipc(handle)

    assert cuda.open_ipc(handle) == at, "opened twice, it is mapped once"
    assert cuda.read(at, 5) == b"first"
    cuda.write(at, b"other")
    other.send("free")
    other.receive()
    cuda.cuIpcCloseMemHandle(at)
    assert cuda.read(at, 5) == b"other"
    assert cuda.free_bytes() == lent
    cuda.cuIpcCloseMemHandle(at)
    assert cuda.free_bytes() == lent + 64 * MEBI
    with refused(INVALID_VALUE):
        cuda.read(at, 5)


@apart(lender)
def test_ipc_handles_that_mean_nothing_here_are_refused(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    pid, handle = other.receive()
    with refused(INVALID_VALUE):
        cuda.open_ipc(bytes(64))
    with refused(INVALID_CONTEXT):
        cuda.open_ipc(cuda.ipc_handle(cuda.alloc(4096)))
    with refused(INVALID_VALUE):
        cuda.ipc_handle(cuda.map_new(PAGE))
    other.send("free nothing")
    other.receive()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}/fd/0").exists())
    with refused(INVALID_HANDLE):
        cuda.open_ipc(handle)


@apart(lender, gpus=2)
def test_memory_of_a_gpu_that_is_not_visible_is_refused(cuda: Cuda, other: Beside) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    cuda.start()
    _, handle = other.receive()
    with refused(INVALID_DEVICE):
        cuda.open_ipc(handle)
    other.send("free nothing")


def exporter(cuda: Cuda, other: Beside) -> None:
    """Passes two parts of memory that is mapped side by side."""
    cuda.start()
    at, sizes = cuda.reserve(3 * PAGE), (PAGE, 2 * PAGE)
    for base, size in zip((at, at + PAGE), sizes, strict=True):
        cuda.map(base, size, handle := cuda.create(size))
        cuda.cuMemRelease(handle)
    cuda.set_access(at, 3 * PAGE)
    cuda.write(at + PAGE - 4, b"across the border")
    other.send(sizes, fds=[cuda.export(at), cuda.export(at + PAGE)])
    other.has_ended(WITHIN_S)


@apart(exporter)
def test_parts_by_descriptor_are_mapped_side_by_side(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    sizes, fds = other.receive_fds()
    at = here = cuda.reserve(sum(sizes))
    for size, fd in zip(sizes, fds, strict=True):
        handle = cuda.import_fd(fd)
        cuda.map(here, size, handle)
        cuda.cuMemRelease(handle)
        os.close(fd)
        here += size
    cuda.set_access(at, sum(sizes))

    assert cuda.read(at + PAGE - 4, 17) == b"across the border"


@apart()
def test_mapped_memory_lives_until_it_is_unmapped_and_released(cuda: Cuda) -> None:
    cuda.start()
    before = cuda.free_bytes()
    at, handle = cuda.reserve(4 * PAGE), cuda.create(4 * PAGE)
    cuda.map(at, 4 * PAGE, handle)
    fd = cuda.export(at)
    cuda.cuMemRelease(handle)
    with refused(INVALID_VALUE):
        cuda.cuMemRelease(handle)
    with refused(INVALID_VALUE):
        cuda.cuMemUnmap(at, PAGE)
    with refused(INVALID_VALUE):
        cuda.cuMemAddressFree(at, 4 * PAGE)
    assert cuda.free_bytes() == before - 4 * PAGE
    cuda.cuMemUnmap(at, 4 * PAGE)
    cuda.cuMemAddressFree(at, 4 * PAGE)
    again = cuda.import_fd(fd)
    assert cuda.free_bytes() == before - 4 * PAGE
    os.close(fd)
    cuda.cuMemRelease(again)

    assert cuda.free_bytes() == before


@apart()
def test_memory_is_exported_only_if_it_was_made_for_it(cuda: Cuda) -> None:
    cuda.start()
    at = cuda.map_new(PAGE, handle_types=0)
    with refused(INVALID_VALUE):
        cuda.export(at)
    with refused(INVALID_VALUE):
        cuda.export(cuda.alloc(PAGE))
    handle = cuda.create(PAGE, handle_types=0)
    found = AllocationProp()
    cuda.cuMemGetAllocationPropertiesFromHandle(byref(found), handle)
    assert (found.handle_types, found.location.id) == (0, 0)


@apart(only_fake=True)
def test_a_descriptor_of_other_memory_is_refused(cuda: Cuda) -> None:
    cuda.start()
    fd = os.memfd_create("no-vram")
    with refused(INVALID_VALUE):
        cuda.import_fd(fd)


@apart()
def test_mappings_stay_within_memory_and_reservation(cuda: Cuda) -> None:
    cuda.start()
    at, handle = cuda.reserve(2 * PAGE), cuda.create(PAGE)
    for base, size in ((at, 2 * PAGE), (at + 2 * PAGE, PAGE), (at, PAGE // 2)):
        with refused(INVALID_VALUE):
            cuda.map(base, size, handle)
    cuda.map(at, PAGE, handle)
    with refused(INVALID_VALUE):
        cuda.map(at, PAGE, handle)
    with refused(INVALID_VALUE):
        cuda.set_access(at, 2 * PAGE)


@apart(only_fake=True)
def test_mapped_memory_is_used_by_those_gpus_that_have_access(cuda: Cuda) -> None:
    cuda.start()
    at = cuda.map_new(PAGE)
    cuda.set_access(at, PAGE, flags=READ)
    cuda.read(at, 1)
    cuda.set_access(at, PAGE, ordinal=1)
    with cuda.on(1):
        cuda.write(at, b"x")
    with refused(ILLEGAL_ADDRESS):
        cuda.write(at, b"x")
    with refused(ILLEGAL_ADDRESS):
        cuda.get(c_int, "cuMemGetInfo_v2", byref(c_int()))
