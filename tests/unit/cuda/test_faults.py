"""Faults that a test plants in processes of the fake driver."""

import os
import time
from ctypes import c_int, c_uint, c_void_p
from pathlib import Path

import pytest

from tests.support.cuda import World
from tests.support.cuda.apart import WITHIN_S, Beside, apart
from tests.support.cuda.calls import PAGE, Cuda, refused
from tests.unit.cuda.test_kernels import KERNELS, load_kernel
from tests.unit.cuda.test_streams import copy_batch

INVALID_VALUE, OUT_OF_MEMORY, MISMATCH, NO_BINARY, NO_PEER = 1, 2, 803, 209, 217
NOT_FOUND, LAUNCH_FAILED, NOT_SUPPORTED = 500, 719, 801
RANGE_SIZE, MAPPING_SIZE = 12, 18


def world() -> World:
    return World(Path(os.environ["FAKE_CUDA_WORLD"]))


@apart(only_fake=True)
def test_an_error_that_sticks_outlives_its_fault(cuda: Cuda) -> None:
    cuda.start()
    at = cuda.alloc(PAGE)
    with world().faults(f"sticky={LAUNCH_FAILED}@{os.getpid() + 1}"):
        cuda.cuCtxSynchronize()
    with world().faults(f"sticky={LAUNCH_FAILED}@{os.getpid()}"), refused(LAUNCH_FAILED):
        cuda.cuCtxSynchronize()
    for name, *given in (("cuMemFree_v2", at), ("cuStreamCreate", c_void_p(), c_uint(0))):
        with refused(LAUNCH_FAILED):
            getattr(cuda, name)(*given)
    with refused(LAUNCH_FAILED):
        cuda.create(PAGE)


def lender(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    other.send(cuda.ipc_handle(cuda.alloc(PAGE)))
    other.has_ended(WITHIN_S)


@apart(lender, gpus=2)
def test_memory_of_others_is_refused_or_has_no_range(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    handle, fd = other.receive(), cuda.export(cuda.map_new(PAGE))
    with world().faults("no_open=801"):
        with refused(NOT_SUPPORTED):
            cuda.open_ipc(handle)
        with refused(NOT_SUPPORTED):
            cuda.import_fd(fd)
    with world().faults("no_peer"), cuda.on(1), refused(NO_PEER):
        cuda.open_ipc(handle)
    at, own = cuda.open_ipc(handle), cuda.alloc(PAGE)
    with world().faults("no_range"):
        with refused(NOT_FOUND):
            cuda.range_of(at)
        for kind in (RANGE_SIZE, MAPPING_SIZE):
            with refused(INVALID_VALUE):
                cuda.attribute(c_int, kind, at)
        cuda.range_of(own)
    cuda.range_of(at)


@apart(faults="no_handle out_of_memory@1", kernels=[KERNELS])
def test_faults_of_the_environment_are_there_from_the_start(cuda: Cuda) -> None:
    cuda.start()
    at, mapped = cuda.alloc(PAGE), cuda.map_new(PAGE)
    for export in (lambda: cuda.ipc_handle(at), lambda: cuda.export(mapped)):
        with refused(INVALID_VALUE):
            export()
    with world().faults("out_of_memory no_kernel no_batch"):
        for allocate in (cuda.alloc, cuda.create):
            with refused(OUT_OF_MEMORY):
                allocate(PAGE)
        with refused(NO_BINARY):
            load_kernel(cuda, "test_copy")
        with refused(NOT_SUPPORTED):
            copy_batch(cuda, [(at, at)], cuda.stream())


@apart(faults="init")
def test_a_driver_may_not_start(cuda: Cuda) -> None:
    with refused(MISMATCH):
        cuda.start()


@apart(only_fake=True)
def test_streams_may_be_slow(cuda: Cuda) -> None:
    cuda.start()
    at, before = cuda.alloc(PAGE), time.monotonic()
    with world().faults("slow=50"):
        cuda.cuMemsetD8Async(at, c_uint(0), PAGE, None)
        cuda.cuStreamSynchronize(None)
    assert time.monotonic() >= before + 0.1


def test_too_many_faults_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), World(tmp_path / "world").faults("slow " * 1000):
        pass
