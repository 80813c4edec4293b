"""Two processes that share GPU memory: ``python -m kvbus.doctor.gpu_pair target|reader``.

The target shares memory in both ways; the reader maps it, and prints what works. Stdin of each is
a socket to the other one.
"""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from kvbus.errors import KVBusError, LocalError, PeerLost
from kvbus.memory import cuda
from kvbus.memory.cuda import driver
from kvbus.memory.gpu_source import GpuSource

_SIZE_BYTES, _MARK = 1 << 20, 42
_MAX_MESSAGE_BYTES, _MAX_FDS = 1 << 16, 8
CAN_WRITE_64_BITS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS


class GpuFacts(msgspec.Struct, frozen=True):
    name: str
    model: str
    size_bytes: int
    has_sequence_words: bool
    inaccessible: tuple[str, ...] = ()
    """Other GPUs whose memory it cannot access."""


class Shared(msgspec.Struct, frozen=True):
    """GPU memory for the other process, or the reason why there is none."""

    source: GpuSource | None = None
    problem: str = ""


class GpuReport(msgspec.Struct, frozen=True):
    """An empty problem means that it works."""

    cuda_version: str
    gpus: tuple[GpuFacts, ...]
    kernel_problem: str
    ipc: Shared
    descriptors: Shared


def _lend(stack: ExitStack) -> tuple[GpuReport, list[int]]:
    fds: list[int] = []
    report = GpuReport(
        driver.driver_version(),
        tuple(_facts()),
        kernel_problem=_problem(lambda: cuda.GpuCopier(0, on_lost=print)),
        ipc=_shared(lambda: _legacy_memory(stack), stack, fds),
        descriptors=_shared(lambda: _parted_memory(stack), stack, fds),
    )
    return report, fds


def _facts() -> list[GpuFacts]:
    seen = cuda.seen_gpus()
    return [
        GpuFacts(
            *gpu,
            has_sequence_words=_has_sequence_words(ordinal),
            inaccessible=tuple(
                other.name
                for number, other in enumerate(seen)
                if number != ordinal and not driver.can_access(ordinal, number)
            ),
        )
        for ordinal, gpu in enumerate(seen)
    ]


def _has_sequence_words(ordinal: int) -> bool:
    return not _problem(lambda: _check(driver.attribute(ordinal, CAN_WRITE_64_BITS)))


def _check(value: int) -> None:
    if not value:
        raise LocalError("the GPU has no 64-bit writes of streams")


def _problem(work: Callable[[], object]) -> str:
    try:
        work()
    except KVBusError as error:
        return error.message
    return ""


def _shared(make: Callable[[], cuda.GpuMemory], stack: ExitStack, fds: list[int]) -> Shared:
    try:
        memory = make()
        cuda.write_bytes(memory.ordinal, memory.address, bytes([_MARK]) * memory.size_bytes)
        source, mine = stack.enter_context(memory.exported())
    except KVBusError as error:
        return Shared(problem=error.message)
    fds += mine
    return Shared(source)


def _legacy_memory(stack: ExitStack) -> cuda.GpuMemory:
    allocation = cuda.GpuAllocation(_SIZE_BYTES, 0)
    stack.callback(allocation.close)
    return allocation.memory


def _parted_memory(stack: ExitStack) -> cuda.GpuMemory:
    with driver.on_gpu(0):
        size_bytes = driver.part_alignment(0)
        part = driver.create_part(size_bytes, 0)
        stack.callback(driver.release_part, part)
        address = driver.reserve(size_bytes, size_bytes)
        driver.map_part(address, size_bytes, part)
        driver.allow_access(address, size_bytes, [0])
    return cuda.GpuMemory(0, address, size_bytes)


def _map(shared: Shared, fds: Sequence[int]) -> Shared:
    if shared.source is None:
        return shared
    source, size_bytes = shared.source, sum(shared.source.parts) or _SIZE_BYTES
    try:
        with cuda.CudaMapping(source, size_bytes, fds) as mapping:
            content = cuda.read_bytes(mapping.ordinal, mapping.address, size_bytes)
            if set(content) != {_MARK}:
                raise LocalError("it read other bytes than the target has")
    except KVBusError as error:
        return Shared(source, error.message)
    return shared


def _be_target(sock: socket.socket) -> None:
    with ExitStack() as stack:
        report, fds = _lend(stack)
        socket.send_fds(sock, [msgspec.json.encode(report)], fds)
        sock.recv(1)  # until the reader has ended


def _be_reader(sock: socket.socket) -> None:
    content, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE_BYTES, _MAX_FDS)
    if not content:
        raise PeerLost("the target has ended")
    lent = msgspec.json.decode(content, type=GpuReport)
    seen = msgspec.structs.replace(
        lent, ipc=_map(lent.ipc, ()), descriptors=_map(lent.descriptors, fds)
    )
    sys.stdout.write(msgspec.json.encode(seen).decode())
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        with socket.socket(fileno=0) as to_other:
            {"target": _be_target, "reader": _be_reader}[sys.argv[1]](to_other)
    except KVBusError as failure:
        sys.stderr.write(f"error: {failure.code}: {failure.message}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the driver's destructors may hang
