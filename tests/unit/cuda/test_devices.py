"""The fake driver shows GPUs and contexts as CUDA does."""

import os
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_ubyte, c_uint, c_void_p
from functools import partial

from tests.support.cuda import uuid
from tests.support.cuda.apart import apart
from tests.support.cuda.calls import Cuda, refused

Uuid = c_ubyte * 16
NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT, DESTROYED = 3, 100, 101, 201, 709


def uuids(cuda: Cuda, call: str = "cuDeviceGetUuid_v2") -> list[str]:
    count = cuda.get(c_int, "cuDeviceGetCount")
    return [bytes(cuda.get(Uuid, call, c_int(number))).hex() for number in range(count)]


def digits(name: str) -> str:
    return name[4:].replace("-", "")


@apart(gpus=4)
def test_visible_devices_are_those_named_up_to_the_first_unknown(cuda: Cuda) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = f"2,{uuid(0)},9,1"
    cuda.start()

    assert uuids(cuda) == [digits(uuid(2)), digits(uuid(0))]
    with refused(INVALID_DEVICE):
        cuda.get(c_int, "cuDeviceGet", c_int(2))


@apart()
def test_a_process_with_no_visible_device_has_no_driver(cuda: Cuda) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with refused(NO_DEVICE):
        cuda.cuInit(0)


@apart(mig=1)
def test_a_mig_instance_has_a_uuid_beside_that_of_its_gpu(cuda: Cuda) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid(1, mig=True)
    cuda.start()

    assert uuids(cuda, "cuDeviceGetUuid") == [digits(uuid(1))]
    assert uuids(cuda) == [digits(uuid(1, mig=True))]


@apart()
def test_calls_need_a_driver_and_a_context_of_their_thread(cuda: Cuda) -> None:
    with refused(NOT_INITIALIZED):
        cuda.get(c_int, "cuDeviceGetCount")
    cuda.start()
    cuda.alloc(1)

    def work() -> None:
        with refused(INVALID_CONTEXT):
            cuda.alloc(1)

    with ThreadPoolExecutor() as threads:
        threads.submit(work).result()


@apart()
def test_the_last_release_of_a_context_frees_its_memory(cuda: Cuda) -> None:
    cuda.start()
    at, before = cuda.alloc(64 << 20), cuda.free_bytes()
    cuda.cuDevicePrimaryCtxRelease_v2(c_int(0))
    with refused(DESTROYED):
        cuda.alloc(1)
    cuda.start()

    assert cuda.free_bytes() >= before + (64 << 20)
    with refused(500):
        cuda.range_of(at)


@apart()
def test_a_fork_of_a_process_with_cuda_has_none(cuda: Cuda) -> None:
    cuda.start()
    if (pid := os.fork()) == 0:
        for start in (partial(cuda.cuInit, 0), partial(cuda.get, c_int, "cuDeviceGetCount")):
            with refused(NOT_INITIALIZED):
                start()
        return
    assert os.waitpid(pid, 0)[1] == 0


@apart(gpus=2)
def test_each_gpu_has_a_context_of_its_own(cuda: Cuda) -> None:
    cuda.start()
    with cuda.on(1):
        at = cuda.alloc(4096)
        assert cuda.attribute(c_int, 9, at) == 1
        free = cuda.free_bytes()
    can, context = c_int(), c_void_p()
    cuda.cuDeviceCanAccessPeer(byref(can), c_int(0), c_int(1))
    cuda.cuCtxGetCurrent(byref(context))

    assert can.value == 1
    assert context.value == cuda.retain(0).value
    assert cuda.free_bytes() > free
    cuda.cuCtxEnablePeerAccess(cuda.retain(1), c_uint(0))
    with refused(704):
        cuda.cuCtxEnablePeerAccess(cuda.retain(1), c_uint(0))
