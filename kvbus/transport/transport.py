"""One NIXL agent and its thread: memory, peers and reads, callable without waiting.

An agent whose READs never end is replaced, and never called again.
"""

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvbus.errors import ClosedError, ErrorCode, LocalError, SegmentError, TransferFailed
from kvbus.table import Key
from kvbus.transport.nixl_agent import NixlAgent, load_backend
from kvbus.transport.scheduler import OnEnd, ReadJob, ReadScheduler
from kvbus.transport.slicing import Rows, Slices, check_rows
from kvbus.transport.types import (
    MemoryKind,
    ReadStatus,
    Registration,
    TransportLimits,
    TransportStats,
)
from kvbus.transport.worker import KnownPeers, Worker

MOST_RETIRED = 16
"""NIXL agents that are kept; each costs some 10 descriptors and 4 MB. Then there is no new one."""
ProgressToken = ExitStack
"""Keeps progress driven until it is closed: as the target of reads, and for connections."""
Deliver = Callable[[Callable[[], None]], object]
"""Runs a function on the caller's thread soon: ``loop.call_soon_threadsafe``."""


@dataclass(frozen=True, slots=True)
class Read:
    """A read in progress. It ends once, by the `on_end` that it was started with."""

    abort: Callable[[], None]
    """Post nothing more; the read ends, aborted, when what was posted is terminal."""


# NIXL cannot take a READ back, and one from a peer that is stopped, or behind a link that drops
# everything, never ends. What it can still do depends on who writes:
#
#     TCP, shared memory   UCX, in this process, when its agent is driven. One that is never called
#                          again writes nothing, so it is kept, with its connections
#     RDMA                 the NIC, by itself: the agent is destroyed, and its queue pairs with it
#
# Tried with nixl 1.5.1 over TCP, and over shared memory without CMA, with a peer that was stopped
# before or within its answer and went on while the new agent read from it: no byte landed after
# either. But UCX aborts a peer whose answer finds its connection closed ("unexpected error:
# Endpoint timeout": 4 of 4 when it was destroyed, 0 of 4 when it was kept). And to destroy one is
# to drive it: what the peer has sent meanwhile lands then. So one that is kept is kept for ever, by
# a reference that is never given up: neither the garbage collector nor the end of the process ends
# it. Those that must be destroyed are before their READs are said to have ended.
#
# A peer is added to the new agent when it is first read from: that connects, which may not be
# possible now.
class Transport:
    """One NIXL agent, its thread, and what it registered, knows and reads.

    Every method returns at once, `read` within the bounds of a short one; futures are of
    `concurrent.futures`. `name` contains the boot id: NIXL refuses another process under a name
    that it knows. `deliver` runs the callbacks on the caller's thread; without one they run where a
    read ends. `on_broken` is told of a defect that ended the thread: reads in progress will never
    end then. `nic_writes` when READs may land though nobody drives this agent, as over RDMA.
    """

    def __init__(
        self,
        name: str,
        *,
        limits: TransportLimits | None = None,
        deliver: Deliver = lambda call: call(),
        on_broken: Callable[[Exception], None] = lambda _: None,
        nic_writes: bool = False,
    ) -> None:
        self.name = name
        self.limits = limits or TransportLimits()
        self._deliver = deliver
        self._worker = Worker(self.limits, lambda error: deliver(partial(on_broken, error)))
        self._keys = itertools.count(1)
        self._registrations: dict[Registration, SegmentError | None] = {}
        """With why, where NIXL refused it when it was opened."""
        self._peers: dict[str, dict[bytes, None]] = {}
        """The metadata of each, in the order in which it came."""
        self.nic_writes = nic_writes
        self._num_retired, self._retired_at = 0, 0.0
        self._known = KnownPeers(self.limits)
        self._num_started = self._num_ended = 0

    def start(self, *, opens: bool = True) -> Future[None]:
        """Start the thread, load NIXL and, unless it is not to be open yet, `open` it."""
        self._worker.start()
        return self._worker.call(self._open if opens else load_backend)

    @property
    def is_open(self) -> bool:
        """Whether there is an agent with a backend, which listens where peers reach it."""
        return self._worker.scheduler is not None

    def open(self) -> Future[None]:
        """Make the agent, with all memory that was registered so far, if there is none yet.

        Takes some 0.1 s. Nothing but `register` and `deregister` can be done before. Fails with
        `TransferFailed`; what NIXL cannot register fails where its metadata is asked for.
        """
        return self._worker.call(self._open)

    def ping(self) -> Future[None]:
        """Done when the thread comes to it; fails with `ClosedError` when that has ended."""
        return self._worker.call(lambda: None, urgent=True)

    def close(self, *, timeout_s: float) -> Future[int]:
        """Abort all reads, wait for posted handles at most `timeout_s`, give all memory back.

        Handles that are not terminal by then are kept, with the memory that they write into: gives
        their number.
        """
        self._worker.post(self._abort_all, urgent=True)
        return self._worker.stop(self._give_back, within_s=timeout_s)

    def register(
        self, address: int, size_bytes: int, *, device: int = 0, memory: MemoryKind = "DRAM"
    ) -> Future[Registration]:
        """Register memory; fails with `SegmentError`. That it is mapped is the caller's word.

        Before the agent is open it is noted, and registered then.
        """
        if address <= 0 or size_bytes <= 0:
            raise SegmentError("no memory", address=address, size_bytes=size_bytes)
        registration = Registration(next(self._keys), address, size_bytes, device, memory)

        def register() -> Registration:
            if self.is_open:
                self._started().agent.register(registration)
            self._registrations[registration] = None
            return registration

        return self._worker.call(register)

    def deregister(self, registration: Registration) -> Future[None]:
        """Take memory back; fails with `LocalError` (busy) while an own handle writes into it."""
        return self._worker.call(partial(self._deregister, registration))

    def metadata(self, registrations: Sequence[Registration] | None = None) -> Future[bytes]:
        """What a peer needs to read here: connection info, and all or the given registrations.

        A later blob may be added to a peer that knows an earlier one, with reads in flight.
        """
        wanted = None if registrations is None else tuple(registrations)

        def metadata() -> bytes:
            for one in wanted or ():
                if (refused := self._registrations.get(one)) is not None:
                    raise refused
            return self._started().agent.metadata(wanted)

        return self._worker.call(metadata)

    def add_peer(self, metadata: bytes) -> Future[str]:
        """Add a peer, or later registrations of a known one; gives its name.

        Fails with `TransferFailed`. NIXL then forgets a peer that it knew, and the outcome of
        what is in flight to it: add only metadata that the peer itself sent.
        """

        def add() -> str:
            peer = self._started().agent.add_peer(metadata)
            self._peers.setdefault(peer, {})[metadata] = None
            return peer

        return self._worker.call(add)

    def remove_peer(self, peer: str) -> Future[None]:
        """Forget a peer; fails with `LocalError` (busy) while a handle to it is outstanding.

        NIXL would go on writing and never tell when it is over (tried: 251 MiB landed after).
        """

        def remove() -> None:
            scheduler = self._started()
            if scheduler.in_flight_to(peer):
                message = "a handle to the peer is outstanding"
                raise LocalError(message, code=ErrorCode.BUSY, peer=peer)
            scheduler.agent.remove_peer(peer)
            self._peers.pop(peer, None)
            self._known.forget(peer)

        return self._worker.call(remove)

    def read(
        self,
        peer: str,
        local: Rows,
        remote: Rows,
        *,
        on_end: OnEnd,
        local_memory: MemoryKind = "DRAM",
        remote_memory: MemoryKind = "DRAM",
        priority: int = 0,
    ) -> Read:
        """Start a READ of descriptors, uint64 [n, 3] columns (address, length in bytes, device).

        A short one may be done when this returns, where the limits have `here_bytes`.
        `on_end` is called exactly once, when nothing of it is in flight any more: never, should a
        peer stay stopped. Of one peer's reads those of a greater `priority` are more urgent. The
        arrays must not change before. Raises `LocalError`: wrong arrays, or
        `busy` at `max_reads`.
        """
        check_rows(local, remote)
        if self._num_started - self._num_ended >= self.limits.max_reads:
            raise LocalError("too many reads", code=ErrorCode.BUSY, max_reads=self.limits.max_reads)
        slices = Slices(
            local,
            remote,
            slice_bytes=self.limits.slice_bytes,
            slice_rows=self.limits.slice_descriptors,
        )
        job = ReadJob(
            peer=peer,
            slices=slices,
            kinds=(local_memory, remote_memory),
            on_end=on_end,
            turn=Key(slices.num_bytes <= self.limits.short_read_bytes, priority),
        )
        self._started()
        self._num_started += 1
        read = Read(partial(self._abort, job))
        if self._known.may_be_here(job) and self._worker.try_here(partial(self._known.read, job)):
            return read
        try:
            self._worker.post(lambda: self._started().add(job))
        except BaseException:
            self._num_started -= 1
            raise
        return read

    def ends_undriven(self, peer: str) -> bool:
        """Whether READs from the peer seem to end though it drives nothing, as they do over CMA."""
        return peer in self._known.undriven

    def hold_progress(self) -> ProgressToken:
        """Have progress driven until the demand is closed; demands are counted."""
        token = ProgressToken()
        token.callback(self._worker.demand, -1)
        self._worker.demand(1)
        return token

    def recycle(self, *, grace_s: float) -> Future[int]:
        """End READs that never do: NIXL's agent is made anew, with all memory and all peers.

        Nothing is posted until then. What is in flight may end within ``grace_s``; the rest fails
        then (`TransferFailed`), or ends as aborted, and nothing of it lands any more. What waits
        goes on. Gives the number of handles that were not terminal. Fails with `KVBusError` when
        there is no new agent: then nothing has ended.
        """

        def hold() -> None:
            self._started().held = True

        self._worker.post(hold, urgent=True)
        is_quiet = lambda: self._started().only_aborted  # noqa: E731
        return self._worker.call_when(is_quiet, self._recycle, within_s=grace_s)

    def stats(self) -> TransportStats:
        """Counts, callable from any thread."""
        scheduler = self._worker.scheduler
        return TransportStats(
            outstanding_reads=self._num_started - self._num_ended,
            outstanding_handles=scheduler.num_handles if scheduler else 0,
            outstanding_bytes=scheduler.posted_bytes if scheduler else 0,
            registered_bytes=sum(one.size_bytes for one in self._registrations.copy()),
            peers=len(self._peers),
            progress_tokens=self._worker.demands,
            progress_calls=self._worker.passes,
            unreleased_handles=scheduler.num_unreleased if scheduler else 0,
            retired_agents=self._num_retired,
            retired_at=self._retired_at,
        )

    def _started(self) -> ReadScheduler:
        if self._worker.scheduler is None:
            raise ClosedError("the transport is not open")
        return self._worker.scheduler

    def _abort(self, job: ReadJob) -> None:
        if not job.ended:
            with contextlib.suppress(ClosedError):  # closing has aborted it already
                self._worker.post(lambda: self._started().abort(job), urgent=True)

    # From here on, on the transport's thread.

    def _open(self) -> None:
        if self._worker.scheduler is not None:
            return
        scheduler = self._new_scheduler(self.name)
        for registration in self._registrations:
            try:
                scheduler.agent.register(registration)
            except SegmentError as error:
                self._registrations[registration] = error
        self._worker.scheduler = scheduler

    def _new_scheduler(self, name: str) -> ReadScheduler:
        return ReadScheduler(NixlAgent(name), self.limits, self._read_ended)

    def _recycle(self) -> int:
        old = self._started()
        try:
            new = self._new_scheduler(f"{self.name}-{self._num_retired + 1}")
            self._take_over(new)
            num_handles = old.num_handles
            self._retire(old)
        except BaseException:
            old.held = False
            raise
        error = TransferFailed("NIXL was made anew under the read, as another one never ended")
        for job in old.hand_over(error):
            new.add(job)
        self._worker.scheduler, self._known = new, KnownPeers(self.limits)
        return num_handles

    def _take_over(self, new: ReadScheduler) -> None:
        """What the agent before knew, which may not be one too many."""
        if self._num_retired >= MOST_RETIRED and not self.nic_writes:
            raise TransferFailed(f"{MOST_RETIRED} NIXL agents are kept already, which is the limit")
        for registration, refused in self._registrations.items():
            if refused is None:
                new.agent.register(registration)
        for peer, blobs in self._peers.items():
            new.agent.add_peer_later(peer, blobs)

    def _retire(self, old: ReadScheduler) -> None:
        """From here on nothing of ``old`` lands."""
        if self.nic_writes:
            old.destroy_agent()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(old))
        self._num_retired += 1
        self._retired_at = time.time()

    def _read_ended(self, job: ReadJob) -> None:
        self._num_ended += 1
        outcome = job.outcome()
        if outcome.status is ReadStatus.DONE:
            self._known.note_done(job)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to hear
            self._deliver(partial(job.on_end, outcome))

    def _deregister(self, registration: Registration) -> None:
        scheduler = self._worker.scheduler
        if registration not in self._registrations:
            raise LocalError("the memory is not registered", key=registration.key)
        if scheduler and scheduler.targets(registration.address, registration.size_bytes):
            raise LocalError("a handle still writes into the memory", code=ErrorCode.BUSY)
        refused = self._registrations.pop(registration)
        if scheduler and refused is None:
            scheduler.agent.deregister(registration)

    def _abort_all(self) -> None:
        if self._worker.scheduler is not None:
            self._worker.scheduler.abort_all()

    def _give_back(self) -> int:
        scheduler = self._worker.scheduler
        num_handles = scheduler.num_handles if scheduler else 0
        for registration in list(self._registrations):
            with contextlib.suppress(LocalError):  # busy, and kept
                self._deregister(registration)
        if not num_handles:
            scheduler = self._worker.scheduler = None  # NIXL ends here, on its own thread
        return num_handles
