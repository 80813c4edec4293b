"""Moving messages between one ZeroMQ socket and one event loop, without a thread or a poll.

From the thread of the loop only. The socket's descriptor is edge-triggered: any call on the socket
can swallow its signal, so ``ZMQ_EVENTS`` is read at the end of each turn, and once in the turn of
the loop that follows on sends. Each look costs some system calls.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TypeAlias

import zmq

Socket: TypeAlias = zmq.Socket[bytes]

_BATCH, _BATCH_BYTES, _BATCH_S = 128, 1 << 20, 0.003
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_MAX_FRAMES = 10  # a question of ZAP has 9


def _nothing() -> None: ...


class Pump:
    """Hands each received message to ``on_frames``; one turn of the loop takes `_BATCH` frames, or
    fewer when they are large or take long, so that other sockets have their turns.

    Of a message of more than `_MAX_FRAMES` the first so many are handed over. ``last`` is the last
    frame that was received, for what ZeroMQ knows of its connection.
    ``on_writable`` sends what waits; it is called by `flush`, and when the socket takes more.
    An exception out of a callback goes to ``on_failure``: callbacks isolate their own users.
    """

    def __init__(
        self,
        socket: Socket,
        *,
        on_frames: Callable[[list[bytes]], None],
        on_failure: Callable[[Exception], None],
        on_writable: Callable[[], None] = _nothing,
    ) -> None:
        self._socket = socket
        self._on_frames, self._on_failure = on_frames, on_failure
        self._on_writable = on_writable
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = True
        self._in_turn = self._scheduled = self._refused = False
        self._has_sent = self._flushes = False
        self._frames: list[bytes] = []
        self.last: zmq.Frame | None = None
        self.was_full = False
        """Whether the last message that was not sent found its peer's queue full."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to receive in ``loop``."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._wake)
        self._schedule()

    def take_last(self) -> None:
        """Hand over what has come, however much: the other side has ended."""
        while self._loop is not None and self._turn(signalled=False) & _POLLIN:
            pass

    def close(self) -> None:
        """Stop, and close the socket; what it has queued is flushed for 0.2 s at most."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if self._open and self._flushes:
            self._on_writable()
        self._open = False
        self._socket.close()

    def send(self, *parts: bytes) -> bool:
        """Send one message now; False when the peer is unroutable, unconnected or at its HWM."""
        if not self._open:
            return False
        send, last = self._socket.send, parts[-1]
        try:
            for part in parts[:-1]:
                send(part, _NOBLOCK | _SNDMORE)
            send(last, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._refused, self.was_full = True, error.errno == zmq.EAGAIN
            return False
        finally:
            if not self._in_turn:
                self._schedule()
            self._has_sent = True
        return True

    # A message that finds ZeroMQ's thread asleep wakes it, by a system call and often by a change
    # of threads, which costs more than the message itself. So the first one of a turn goes at once:
    # nothing may follow. Those behind it go together, and find that thread at work:
    #
    #     one question    ─▶ answer
    #     64 questions    ─▶ answer   2 .. 64 are kept   ─▶ 63 answers, and one wake-up
    #                     └───────── one turn ──────────┘
    def flush(self) -> None:
        """Call ``on_writable``: now, or with all that is sent later in this turn of the loop."""
        if self._has_sent and self._loop is not None:
            self._flushes = True
        else:
            self._on_writable()

    def _schedule(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._wake, False)

    def _wake(self, signalled: bool = True) -> None:
        if signalled and self._scheduled:  # a turn is due anyway; two would take two batches
            return
        self._scheduled = False
        if self._loop is None:
            return
        try:
            events = self._turn(signalled=signalled)
            if self._refused and events & _POLLOUT:
                self._refused = False
                self._on_writable()
            if events & _POLLIN:  # the batch was full; a send since then has looked by itself
                self._schedule()
        except Exception as error:  # a bug of ours: it must end the owner, not the loop's handler
            self._on_failure(error)

    # A signal is nearly always for a message, so that is tried first. Where one follows there are
    # most often more: they are taken until there is none.
    def _turn(self, *, signalled: bool) -> int:
        """Take a batch, send what waits, and look what there is then."""
        get, recv = self._socket.get, self._socket.recv
        num_frames = num_bytes = 0
        surely, events, ends_at = signalled, -1, perf_counter() + _BATCH_S
        self._in_turn = True
        try:
            while num_frames < _BATCH and num_bytes <= _BATCH_BYTES and self._loop is not None:
                if num_frames and perf_counter() >= ends_at:
                    break
                # The frames of a message are there together; before its first one is to be asked.
                if not self._frames and not surely:
                    events = int(get(_EVENTS))
                    if not events & _POLLIN:
                        break
                    surely = num_frames > 0
                try:
                    self.last = frame = recv(_NOBLOCK, copy=False)
                except zmq.Again:
                    events = -1 if self._refused else 0
                    break
                content, events = frame.bytes, -1
                num_frames, num_bytes = num_frames + 1, num_bytes + len(content)
                if len(self._frames) < _MAX_FRAMES:
                    self._frames.append(content)
                if not frame.more:
                    if signalled:
                        signalled = surely = False
                    frames, self._frames = self._frames, []
                    self._on_frames(frames)
            if self._flushes and self._loop is not None:
                self._flushes, events = False, -1
                self._on_writable()
            if self._loop is None:  # a callback closed this pump
                return 0
            self._has_sent = False
            return int(get(_EVENTS)) if events < 0 else events
        finally:
            self._in_turn = False
