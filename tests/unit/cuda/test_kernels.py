"""The fake driver runs host builds of kernels, and stops those that touch what a GPU could not."""

import ctypes
from ctypes import addressof, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from tests.support.cuda.apart import apart
from tests.support.cuda.calls import Cuda, refused
from tests.unit.cuda.test_streams import Gate, pinned

KERNELS = Path(__file__).with_name("kernels.cu")
PTX = b".version 9.0\n.target sm_90\n.entry test_copy(\n.entry test_order(\n"
IMAGE_INVALID, NO_BINARY, NEWER_PTX = 200, 209, 222
INVALID_VALUE, INVALID_HANDLE, NOT_FOUND, ILLEGAL_ADDRESS = 1, 400, 500, 700
WORD = 16
NUM = 600
SIZE = NUM * WORD
CONTENT = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


class Copy(ctypes.Structure):
    _fields_ = (("source", c_uint64), ("target", c_uint64), ("num", c_uint64))


def load_kernel(cuda: Cuda, name: str, ptx: bytes = PTX) -> c_void_p:
    module = cuda.get(c_void_p, "cuModuleLoadData", ptx)
    return c_void_p(cuda.get(c_void_p, "cuModuleGetFunction", c_void_p(module), name.encode()))


def launch(
    cuda: Cuda, kernel: c_void_p, stream: c_void_p | None, *given: Any, grid: int = 3
) -> None:
    places = (c_void_p * len(given))(*map(addressof, given))
    shape = [c_uint(number) for number in (1, grid, 1, 100, 1, 1, 0)]
    cuda.cuLaunchKernel(kernel, *shape, stream, places, None)
    ctypes.memset(addressof(given[0]), 0xFF, ctypes.sizeof(given[0]))


def launch_copy(cuda: Cuda, stream: c_void_p | None, source: int, target: int) -> None:
    kernel = load_kernel(cuda, "test_copy")
    launch(cuda, kernel, stream, Copy(source, target, NUM), c_uint(100), grid=1)


@apart(kernels=[KERNELS])
def test_a_kernel_runs_on_its_stream_with_arguments_of_its_launch(cuda: Cuda) -> None:
    cuda.start()
    gate, stream, host = Gate(cuda), cuda.stream(), pinned(cuda, CONTENT)
    to, last = cuda.alloc(SIZE), cuda.alloc(4)
    cuda.write(to, bytes(SIZE))
    gate.hold(stream)
    launch_copy(cuda, stream, addressof(host), to)
    launch(cuda, load_kernel(cuda, "test_order"), stream, c_uint64(last))

    assert cuda.read(to, SIZE) == bytes(SIZE)
    gate.open()
    cuda.cuStreamSynchronize(stream)
    assert cuda.read(to, SIZE) == CONTENT
    assert int.from_bytes(cuda.read(last, 4), "little") == 400, "block 0 is not the last"


def check_fault(cuda: Cuda, source: int, target: int) -> None:
    launch_copy(cuda, None, source, target)
    for _ in range(2):
        with refused(ILLEGAL_ADDRESS):
            cuda.cuCtxSynchronize()


@apart(kernels=[KERNELS])
def test_a_kernel_that_leaves_an_allocation_loses_the_context(cuda: Cuda) -> None:
    cuda.start()
    check_fault(cuda, cuda.alloc(SIZE), cuda.alloc(SIZE - 1))


@apart(kernels=[KERNELS])
def test_a_kernel_cannot_read_pageable_memory(cuda: Cuda) -> None:
    cuda.start()
    host = ctypes.create_string_buffer(SIZE)
    check_fault(cuda, addressof(host), cuda.alloc(SIZE))


@apart(kernels=[KERNELS])
def test_a_kernel_reads_a_peer_that_its_context_may_access(cuda: Cuda) -> None:
    cuda.start()
    with cuda.on(1):
        source = cuda.alloc(SIZE)
        cuda.write(source, CONTENT)
    to = cuda.alloc(SIZE)
    cuda.cuCtxEnablePeerAccess(cuda.retain(1), c_uint(0))
    launch_copy(cuda, None, source, to)
    assert cuda.read(to, SIZE) == CONTENT
    with cuda.on(1):
        check_fault(cuda, to, source)


@apart(kernels=[KERNELS])
def test_what_is_no_kernel_of_this_context_is_refused(cuda: Cuda) -> None:
    cuda.start()
    for name in ("test_none", "host_kernel"):
        with refused(NOT_FOUND):
            load_kernel(cuda, name)
    with refused(NOT_FOUND):
        load_kernel(cuda, "test_copy", PTX.replace(b"test_copy", b"another"))
    with refused(IMAGE_INVALID):
        load_kernel(cuda, "test_copy", b"no PTX")
    with refused(NEWER_PTX):
        load_kernel(cuda, "test_copy", PTX.replace(b"9.0", b"9.1"))
    kernel = load_kernel(cuda, "test_order")
    with refused(INVALID_VALUE):
        launch(cuda, kernel, None, c_uint64(), grid=0)
    with cuda.on(1), refused(INVALID_HANDLE):
        launch(cuda, kernel, None, c_uint64())


@apart(kernels=[KERNELS], old_driver=True)
def test_an_old_driver_refuses_newer_ptx(cuda: Cuda) -> None:
    cuda.start()
    with refused(NEWER_PTX):
        load_kernel(cuda, "test_copy", PTX.replace(b"9.0", b"8.3"))
    load_kernel(cuda, "test_copy", PTX.replace(b"9.0", b"8.2"))


@apart(kernels=[])
def test_a_kernel_without_a_host_build_does_not_load(cuda: Cuda) -> None:
    cuda.start()
    with refused(NO_BINARY):
        load_kernel(cuda, "test_copy")
