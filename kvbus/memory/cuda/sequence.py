"""Words of host memory that a GPU writes in the order of a stream."""

from kvbus.errors import SegmentError
from kvbus.memory.cuda import driver


class StreamWords:
    """The words of a page at ``address``, for streams of one GPU. Raises `SegmentError`."""

    def __init__(self, ordinal: int, address: int, size_bytes: int) -> None:
        if not driver.attribute(ordinal, driver.STREAMS_WRITE_64_BITS):
            raise SegmentError(
                f"GPU {ordinal} cannot write sequence numbers: it or its driver has no 64-bit "
                "memory operations of streams. Use a bounce buffer (kvbus.engine.bounce), or host "
                "memory"
            )
        self._ordinal, self._address = ordinal, address
        with driver.on_gpu(ordinal):
            self._on_gpu = driver.pin(address, size_bytes)

    def write(self, stream: int, word: int, number: int) -> None:
        """Queue the write behind the work so far on ``stream``, a ``CUstream``."""
        with driver.on_gpu(self._ordinal):
            driver.write_value(self._on_gpu + 8 * word, number, stream)

    def close(self) -> None:
        """Unpin the page; all queued writes must be there."""
        with driver.on_gpu(self._ordinal):
            driver.unpin(self._address)
