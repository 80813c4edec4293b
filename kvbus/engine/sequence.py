"""Sequence numbers of an engine process: which GPU work has ended, for its agent.

Number n is reached when word n % 512 of the page holds n or more. Each stream has a word.
"""

import ctypes
import mmap
import os
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from kvbus.errors import ClosedError, LocalError, SegmentError
from kvbus.memory.cuda.sequence import StreamWords
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.engine import NUM_SEQUENCE_WORDS, SEQUENCE_BYTES

if TYPE_CHECKING:
    Stream = torch.cuda.Stream | int | None

_Words = ctypes.c_uint64 * NUM_SEQUENCE_WORDS


class PageName(NamedTuple):
    """Address of a page of sequence numbers; ``name`` is unique over all machines."""

    pid: int
    fd: int
    name: str


class PageView:
    """A read-only page of sequence numbers: number n is reached when ``page[n % 512] >= n``."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SEQUENCE_BYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def open(cls, page: PageName) -> Self | None:
        """Open a page; return None if it is on another machine, or its process has ended."""
        path = Path(f"/proc/{page.pid}/fd/{page.fd}")
        try:
            if not str(path.readlink()).startswith(f"/memfd:{page.name} "):
                return None
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = Path(f"/proc/self/fd/{fd}").readlink()
            return cls(fd) if str(found).startswith(f"/memfd:{page.name} ") else None
        finally:
            os.close(fd)

    def __getitem__(self, word: int) -> int:
        return self._words[word]


class HostWords:
    """The words of host memory: a write is the end of the work before it."""

    def __init__(self) -> None:
        name = f"kvbus-{uuid.uuid4().hex}"
        self._segment = SharedSegment(SEQUENCE_BYTES, name=name)
        self.name = PageName(os.getpid(), self._segment.fd, name)
        self._words = _Words.from_address(self._segment.address)

    @property
    def fd(self) -> int:
        return self._segment.fd

    def open(self) -> None:
        """Make writes possible. Raises `SegmentError`."""

    def stream(self, stream: "Stream") -> int:
        return 0

    def write(self, stream: int, number: int) -> None:
        self._words[number % NUM_SEQUENCE_WORDS] = number

    def close(self) -> None:
        self._segment.close()


class GpuWords(HostWords):
    """Words that the streams of one GPU write."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self._ordinal, self._lock = ordinal, threading.Lock()
        self._opened: StreamWords | None = None
        self._last: dict[int, int] = {}

    def open(self) -> None:
        self._streams()

    def stream(self, stream: "Stream") -> int:
        if stream is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            stream = torch.cuda.current_stream(self._ordinal)
        return stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else stream or 0

    def write(self, stream: int, number: int) -> None:
        word = number % NUM_SEQUENCE_WORDS
        self._streams().write(stream, word, number)
        self._last[word] = number

    # GPU work may never end, as that of a lost peer. A GPU that still writes keeps the page.
    def close(self) -> None:
        opened, self._opened = self._opened, None
        if any(self._words[word] < number for word, number in self._last.items()):
            _kept.append((self, opened))
            return
        if opened is not None:
            with suppress(SegmentError):  # CUDA is lost: nothing writes any more
                opened.close()
        super().close()

    def _streams(self) -> StreamWords:
        with self._lock:
            if self._opened is None:
                self._opened = StreamWords(self._ordinal, self._segment.address, SEQUENCE_BYTES)
            return self._opened


_kept: list[tuple[GpuWords, StreamWords | None]] = []
"""Pages that streams will write; they stay until this process ends."""


class Recorder:
    """The pages of a link: one for host memory, one for each GPU. Thread-safe."""

    def __init__(self) -> None:
        self._pages: dict[int | None, HostWords] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        """Last number by stream; the order of streams numbers them."""
        self._lock, self._is_closed = threading.Lock(), False

    def page(self, ordinal: int | None) -> HostWords:
        """``ordinal`` is that of the GPU, or None for host memory."""
        if ordinal not in self._pages:
            self._pages[ordinal] = HostWords() if ordinal is None else GpuWords(ordinal)
        return self._pages[ordinal]

    @property
    def names(self) -> tuple[PageName, ...]:
        return tuple(page.name for page in self._pages.values())

    def record(self, number: int | None, stream: "Stream") -> int:
        pages = self._pages.values()
        if not pages:
            raise LocalError("record() is for the link of a rank: this one has no memory")
        if stream is not None and len(pages) > 1:
            raise LocalError("the link's memory is on several devices: record() takes no stream")
        streams = tuple(page.stream(stream) for page in pages)
        with self._lock:  # the writes of one word keep the order of its numbers
            if self._is_closed:
                raise ClosedError("the link is closed")
            if number is None:
                number = self._next(streams)
            for page, handle in zip(pages, streams, strict=True):
                page.write(handle, number)
        return number

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            for page in () if was_closed else self._pages.values():
                page.close()

    def _next(self, streams: tuple[int, ...]) -> int:
        last = self._counts.get(streams)
        if last is None:
            last = len(self._counts)
            if last == NUM_SEQUENCE_WORDS:
                raise LocalError(f"more than {NUM_SEQUENCE_WORDS} streams record")
        self._counts[streams] = last + NUM_SEQUENCE_WORDS
        return last + NUM_SEQUENCE_WORDS
