"""Memory of another process's GPU: what it claims is checked, and all of it is given back."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.errors import KVBusError
from kvbus.memory.cuda import CudaMapping, GpuMemory, driver, gpu_uuid
from kvbus.memory.gpu_source import GpuSource, PassedGpuMemory
from tests.support.cuda import World
from tests.support.cuda.apart import WITHIN_S, Beside, apart
from tests.support.cuda.calls import PAGE, Cuda, refused

INVALID_VALUE = 1
OFFSET = 4096
SIZE = PAGE - OFFSET
CONTENT = b"the engine's"
Lent = tuple[GpuSource, list[int]]


def lender(cuda: Cuda, other: Beside) -> None:
    """Lends the end of one page by a handle, and of two parts by descriptors."""
    cuda.start()
    whole = cuda.alloc(PAGE)
    parts = cuda.reserve(2 * PAGE)
    for at in (parts, parts + PAGE):
        cuda.map(at, PAGE, handle := cuda.create(PAGE))
        cuda.cuMemRelease(handle)
    cuda.set_access(parts, 2 * PAGE)
    for at, size in ((whole, SIZE), (parts, SIZE + PAGE)):
        cuda.write(at + OFFSET, CONTENT)
        with GpuMemory(0, at + OFFSET, size).exported() as (source, fds):
            other.send(source, fds=fds)
    other.has_ended(WITHIN_S)


def borrowed(other: Beside) -> tuple[Lent, Lent]:
    return other.receive_fds(), other.receive_fds()


def reason(what: Callable[[], Any]) -> str:
    with pytest.raises(KVBusError) as found:
        what()
    return found.value.message


@apart(lender, gpus=2)
def test_claims_beyond_another_process_memory_are_refused(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    (whole, _), (parts, fds) = borrowed(other)
    world, beyond = World(Path(os.environ["FAKE_CUDA_WORLD"])), 1 << 40
    larger = CudaMapping(whole, SIZE)
    for faults, words in ([], "of a CUDA allocation of 2097152"), (["no_range"], "CUDA knows no"):
        with world.faults(*faults):
            for source in whole, replace(whole, offset_bytes=beyond):
                size = SIZE + 1 + (PAGE if faults else 0)
                assert words in reason(partial(CudaMapping, source, size))
            CudaMapping(whole, SIZE).close()
    larger.close()
    assert "has 64 bytes, not 63" in reason(
        lambda: CudaMapping(replace(whole, handle=whole.handle[1:]), SIZE)
    )
    assert "of parts of 4194304 bytes" in reason(lambda: CudaMapping(parts, SIZE + PAGE + 1, fds))
    assert "with 1 descriptors" in reason(lambda: CudaMapping(parts, SIZE + PAGE, fds[:1]))
    both = replace(parts, handle=whole.handle)
    assert "either a handle or parts" in reason(lambda: CudaMapping(both, SIZE, fds))


@apart(lender, gpus=2)
def test_memory_of_another_process_is_readable_until_it_is_closed(
    cuda: Cuda, other: Beside
) -> None:
    cuda.start()
    (whole, _), (parts, fds) = borrowed(other)
    lent = cuda.free_bytes()
    opened = [CudaMapping(whole, SIZE), CudaMapping(parts, SIZE + PAGE, fds)]
    for fd in fds:
        os.close(fd)
    for one in opened:
        assert cuda.read(one.address, len(CONTENT)) == CONTENT
    other.send("end")
    assert other.has_ended(WITHIN_S)
    for one in opened:
        cuda.read(one.address + one.size_bytes - 1, 1)
        one.close()
        one.close()
        assert driver.allocation_of(one.address) is None
    with refused(INVALID_VALUE):
        cuda.cuMemAddressFree(opened[1].address - OFFSET, 2 * PAGE)
    assert cuda.free_bytes() == lent + 3 * PAGE


@apart(lender, gpus=2)
def test_each_reading_gpu_has_access_or_is_named(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    (whole, _), (parts, fds) = borrowed(other)
    first, second = gpu_uuid(0), gpu_uuid(1)
    mapping = CudaMapping(parts, SIZE + PAGE, fds, readers=(first, second))
    for ordinal in (0, 1):
        with cuda.on(ordinal):
            assert cuda.read(mapping.address, len(CONTENT)) == CONTENT
    mapping.close()
    with CudaMapping(whole, SIZE, readers=(second,)) as mapping, cuda.on(1):
        assert cuda.read(mapping.address, len(CONTENT)) == CONTENT
    free = cuda.free_bytes()
    assert "different addresses" in reason(
        lambda: CudaMapping(whole, SIZE, readers=(first, second))
    )
    assert cuda.free_bytes() == free
    with World(Path(os.environ["FAKE_CUDA_WORLD"])).faults("no_peer"):
        named = reason(lambda: CudaMapping(parts, SIZE, fds, readers=(first, second)))
    assert named == f"{second} cannot access {first}"


def test_further_parts_are_of_the_same_segment() -> None:
    first = GpuSource("GPU-a", 0, parts=(PAGE,))
    passed = PassedGpuMemory(first, 2 * PAGE, [])
    for other, size in (
        (first, PAGE),
        (replace(first, device="GPU-b"), 2 * PAGE),
        (replace(first, offset_bytes=1), 2 * PAGE),
        (replace(first, handle=bytes(64)), 2 * PAGE),
    ):
        assert "another segment" in reason(partial(passed.add, other, size, []))
    assert not passed.is_whole
    passed.add(first, 2 * PAGE, [])
    assert passed.is_whole
    assert "another segment" in reason(lambda: passed.add(first, 2 * PAGE, []))
