"""Bridge between one ZeroMQ socket and one event loop, without a thread or polling.

The socket's descriptor is edge-triggered, and any call on the socket can consume its signal. So
``ZMQ_EVENTS`` is read at the end of each turn, and once in the loop turn after sends.
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
_MAX_FRAMES = 10  # a ZAP request has 9


def _nothing() -> None: ...


class Pump:
    """Receiver and sender of one socket, used from the loop's thread.

    A turn takes up to `_BATCH` frames, to be fair to other sockets. ``on_frames`` gets up to
    `_MAX_FRAMES` of each message. ``last`` is the last frame.
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
        """By the last failed send."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._wake)
        self._schedule()

    def take_last(self) -> None:
        while self._loop is not None and self._turn(signalled=False) & _POLLIN:
            pass

    def close(self) -> None:
        """Close the socket; it flushes for up to 0.2 s."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if self._open and self._flushes:
            self._on_writable()
        self._open = False
        self._socket.close()

    def send(self, *parts: bytes) -> bool:
        """Return False if the peer is unroutable, unconnected or at its HWM."""
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

    # A message that finds ZeroMQ's thread asleep wakes it, by a system call and often a thread
    # switch. That costs more than the message itself. The first message of a turn is sent at once,
    # as no other may follow. Later ones of the turn are sent together, and find that thread awake:
    #
    #     1 request      ─▶ reply
    #     64 requests    ─▶ reply    2 .. 64 are queued   ─▶ 63 replies, and one wake-up
    #                    └────────── one turn ───────────┘
    def flush(self) -> None:
        """Call ``on_writable``: now, or with all other sends of this turn."""
        if self._has_sent and self._loop is not None:
            self._flushes = True
        else:
            self._on_writable()

    def _schedule(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._wake, False)

    def _wake(self, signalled: bool = True) -> None:
        if signalled and self._scheduled:  # a turn is scheduled already; two would take two batches
            return
        self._scheduled = False
        if self._loop is None:
            return
        try:
            events = self._turn(signalled=signalled)
            if self._refused and events & _POLLOUT:
                self._refused = False
                self._on_writable()
            if events & _POLLIN:  # the batch was full; a later send schedules its own turn
                self._schedule()
        except Exception as error:  # a kvbus bug: fail the owner, not just the loop's handler
            self._on_failure(error)

    # A signal nearly always means a message, so receive before reading ``ZMQ_EVENTS``. More
    # messages often follow, so receive until there is none.
    def _turn(self, *, signalled: bool) -> int:
        get, recv = self._socket.get, self._socket.recv
        num_frames = num_bytes = 0
        surely, events, ends_at = signalled, -1, perf_counter() + _BATCH_S
        self._in_turn = True
        try:
            while num_frames < _BATCH and num_bytes <= _BATCH_BYTES and self._loop is not None:
                if num_frames and perf_counter() >= ends_at:
                    break
                # A message's frames arrive together. Check the events only before its first frame.
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
