"""Bytes that are written to a GPU are there when the call returns."""

from kvbus.memory import cuda
from tests.support import cuda as fake
from tests.support.cuda.apart import apart

SIZE_BYTES = 64 << 10


@apart(only_fake=True, faults="slow=200")
def test_written_bytes_are_there_at_the_end_of_the_call() -> None:
    allocation = cuda.GpuAllocation(SIZE_BYTES, 0)

    cuda.write_bytes(0, allocation.address, b"x" * SIZE_BYTES)

    assert bytes(fake.view(allocation.address, SIZE_BYTES)) == b"x" * SIZE_BYTES
