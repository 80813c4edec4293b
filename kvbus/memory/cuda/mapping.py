"""GPU memory of another process, open in this one.

Zeros cannot replace this memory: all copies must end before `close`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvbus.errors import ProtocolError, SegmentError
from kvbus.memory.cuda import driver
from kvbus.memory.cuda.gpus import gpu_ordinal
from kvbus.memory.gpu_source import GpuSource
from kvbus.memory.mapping import OwnedMemory


class CudaMapping(OwnedMemory):
    """Memory of another process, accessible to the GPUs of ``readers``, by default to its own.

    Borrows ``fds``. Blocks for milliseconds, or seconds the first time: use a thread. Raises
    `SegmentError`.
    """

    def __init__(
        self,
        source: GpuSource,
        size_bytes: int,
        fds: Sequence[int] = (),
        *,
        readers: Sequence[str] = (),
    ) -> None:
        source.check(size_bytes)
        self.device, self.size_bytes = source.device, size_bytes
        self.ordinal = gpu_ordinal(source.device)
        ordinals = [gpu_ordinal(one) for one in readers or (source.device,)]
        for name, one in zip(readers, ordinals, strict=False):
            if one != self.ordinal and not driver.can_access(one, self.ordinal):
                raise SegmentError(f"{name} cannot access {source.device}", device=name)
        with ExitStack() as undo:
            base = (
                _open_handle(source, size_bytes, ordinals, undo.callback)
                if source.handle
                else _map_parts(source, fds, ordinals, undo.callback)
            )
            self.address = base + source.offset_bytes
            self._undo = undo.pop_all()
        self.closed = False

    def discard(self) -> None:
        """Do nothing: `close` follows once no copy runs."""

    def close(self) -> None:
        """Idempotent. No copy may run. May block: use a thread."""
        was_closed, self.closed = self.closed, True
        if not was_closed:
            self._undo.close()


OnClose = Callable[..., object]


def _open_handle(
    source: GpuSource, size_bytes: int, ordinals: Sequence[int], on_close: OnClose
) -> int:
    if len(source.handle) != driver.HANDLE_BYTES:
        raise SegmentError(
            f"a CUDA memory handle has {driver.HANDLE_BYTES} bytes, not {len(source.handle)}"
        )
    bases = set[int]()
    for ordinal in ordinals:
        with driver.on_gpu(ordinal):
            base = _open_of_other(source.handle)
        on_close(_close_handle, ordinal, base)
        bases.add(base)
    if len(bases) > 1:
        raise SegmentError("CUDA gives several GPUs different addresses for one legacy handle")
    with driver.on_gpu(ordinals[0]):
        _check_extent(source, size_bytes, base)
    return base


def _open_of_other(handle: bytes) -> int:
    try:
        return driver.open_handle(handle)
    except SegmentError as error:
        if error.detail.get("cuda_error") != driver.INVALID_CONTEXT:
            raise
        raise SegmentError(
            f"CUDA takes the handle for one of this process ({error.message}): engine and agent "
            "have the same PID, each in a PID namespace of its own. Start both in one namespace "
            "(docker --pid; shareProcessNamespace in a pod)"
        ) from error


def _close_handle(ordinal: int, base: int) -> None:
    with driver.on_gpu(ordinal):
        driver.close_handle(base)


# CUDA does not always know the size of imported memory. Then the first and the last byte must at
# least belong to one buffer: an access outside of it would end this process.
def _check_extent(source: GpuSource, size_bytes: int, base: int) -> None:
    end = source.offset_bytes + size_bytes
    actual_bytes = _size_of(base)
    if actual_bytes is None:
        first, last = (
            driver.pointer_attribute(driver.BUFFER_ID, at) for at in (base, base + end - 1)
        )
        if first is None or first != last:
            raise SegmentError(f"CUDA knows no {end} bytes of the allocation", claimed_bytes=end)
    elif end > actual_bytes:
        raise SegmentError(
            f"{size_bytes} bytes from byte {source.offset_bytes} on were claimed of a CUDA "
            f"allocation of {actual_bytes}",
            claimed_bytes=end,
            actual_bytes=actual_bytes,
        )


def _size_of(base: int) -> int | None:
    found = driver.allocation_of(base)
    return driver.pointer_attribute(driver.RANGE_SIZE, base) if found is None else found[1]


# A part stays allocated while it is mapped here, also after its process has ended.
def _map_parts(
    source: GpuSource, fds: Sequence[int], ordinals: Sequence[int], on_close: OnClose
) -> int:
    if len(fds) != len(source.parts):
        raise ProtocolError(f"{len(source.parts)} parts came with {len(fds)} descriptors")
    with driver.on_gpu(ordinals[0]):
        alignment, total = driver.part_alignment(ordinals[0]), sum(source.parts)
        base = driver.reserve(-(-total // alignment) * alignment, alignment)
        on_close(driver.unreserve, base, -(-total // alignment) * alignment)
        at = base
        for fd, size_bytes in zip(fds, source.parts, strict=True):
            handle = driver.import_part(fd)
            try:
                driver.map_part(at, size_bytes, handle)
            finally:
                driver.release_part(handle)
            on_close(_unmap, ordinals[0], at, size_bytes)
            at += size_bytes
        driver.allow_access(base, total, sorted(set(ordinals)))
    return base


def _unmap(ordinal: int, address: int, size_bytes: int) -> None:
    with driver.on_gpu(ordinal):
        driver.unmap(address, size_bytes)
