"""A simulated transport: READs land in real memory, late and in parts, or never.

It has what `kvbus.transport.Transport` has. As NIXL it cannot take back what is posted; it moves
nothing while one of the two processes is frozen, or the target's progress is not driven; a peer
that was killed is an error soon after; memory that is not registered any more fails a READ.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbus.errors import ErrorCode, LocalError, PeerLost, RemoteError, TransferFailed
from kvbus.transport import (
    PeerMetadata,
    ProgressToken,
    Read,
    ReadOutcome,
    ReadStatus,
    Registration,
    TransportLimits,
    TransportStats,
)
from tests.sim.network import Network, Process

Rows = npt.NDArray[np.uint64]
STALLED_LOOK_S = 0.02
KILLED_S = 0.05
MOST_PARTS, MOST_POSTED = 3, 2


@dataclass(slots=True, eq=False)
class _Job:
    """A READ: its parts that wait, and how many are posted."""

    peer: str
    on_end: Callable[[ReadOutcome], None]
    parts: list[tuple[Rows, Rows]]
    posted: list[Rows] = field(default_factory=list)
    num_bytes: int = 0
    num_slices: int = 0
    is_aborted: bool = False
    error: RemoteError | None = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Fabric:
    """All transports of a world, by the names of their agents.

    A part takes ``part_s``; in so many cases, ``flips``, one bit of it is another one afterwards.
    """

    network: Network
    part_s: float = 300e-6
    flips: float = 0.0
    transports: "dict[str, SimTransport]" = field(default_factory=dict)


class SimTransport:
    is_open = True

    def __init__(self, fabric: Fabric, process: Process, name: str) -> None:
        self.name, self.limits, self.process = name, TransportLimits(), process
        self._fabric, self._world = fabric, fabric.network.world
        self._registrations: dict[int, Registration] = {}
        self._peers: set[str] = set()
        self._broken: set[str] = set()
        self._jobs: set[_Job] = set()
        self._num_keys = self._num_recycled = 0
        self._is_held = False
        self.num_progress = 0
        fabric.transports[name] = self

    def open(self) -> Future[None]:
        return _done(None)

    def ping(self) -> Future[None]:
        return _done(None)

    def close(self, *, timeout_s: float) -> Future[int]:
        return _done(0)

    def register(
        self, address: int, size_bytes: int, *, device: int = 0, memory: Any = "DRAM"
    ) -> Future[Registration]:
        self._num_keys += 1
        made = Registration(self._num_keys, address, size_bytes, device, memory)
        self._registrations[made.key] = made
        return _done(made)

    def deregister(self, registration: Registration) -> Future[None]:
        """Refused while a READ of this side writes into it."""
        start, stop = registration.address, registration.address + registration.size_bytes
        for job in self._jobs:
            if any(((rows[:, 0] < stop) & (rows[:, 0] >= start)).any() for rows in job.posted):
                return _failed(LocalError("in use", code=ErrorCode.BUSY))
        del self._registrations[registration.key]
        return _done(None)

    def metadata(self, registrations: Sequence[Registration] | None = None) -> Future[bytes]:
        return _done(_blob(self.name))

    def add_peer(self, metadata: bytes) -> Future[str]:
        name = PeerMetadata.read(metadata).name
        other = self._fabric.transports[name]
        if self._fabric.network.is_cut(self.process.machine, other.process.machine):
            return _failed(TransferFailed("no way there"))
        self._peers.add(name)
        return _done(name)

    def remove_peer(self, peer: str) -> Future[None]:
        """Refused while something of it is posted."""
        if any(job.peer == peer for job in self._jobs):
            return _failed(LocalError("in use", code=ErrorCode.BUSY))
        self._peers.discard(peer)
        self._broken.discard(peer)
        return _done(None)

    def reset(self) -> None:
        """Lose all connections: READs fail until their peer is removed and added again."""
        self._broken |= self._peers
        for job in list(self._jobs):
            job.error, job.posted = job.error or _lost(job.peer), []
            self._end(job)

    def read(
        self,
        peer: str,
        local: Rows,
        remote: Rows,
        *,
        on_end: Callable[[ReadOutcome], None],
        priority: int = 0,
        **_: Any,
    ) -> Read:
        if self._world.luck.chance(self._world.lacks):
            raise MemoryError
        num_parts = min(len(local), 1 + self._world.luck.below(MOST_PARTS))
        pieces = zip(
            np.array_split(local, num_parts), np.array_split(remote, num_parts), strict=True
        )
        job = _Job(peer=peer, on_end=on_end, parts=list(pieces))
        if peer not in self._peers - self._broken:
            job.error = _lost(peer)
        self._jobs.add(job)
        self._post(job)
        return Read(partial(self._abort, job))

    def ends_undriven(self, peer: str) -> bool:
        """A guess that is wrong where they are of one machine."""
        return self._fabric.transports[peer].process.machine == self.process.machine

    def hold_progress(self) -> ProgressToken:
        token = ProgressToken()
        self.num_progress += 1
        token.callback(self._end_progress)
        return token

    def recycle(self, *, grace_s: float) -> Future[int]:
        """After the grace nothing that was posted lands any more, and it ends as failed."""
        self._is_held = True
        done: Future[int] = Future()
        self._world.after(grace_s, self._recycle, done)
        return done

    def stats(self) -> TransportStats:
        return TransportStats(
            outstanding_reads=len(self._jobs),
            outstanding_handles=sum(len(job.posted) for job in self._jobs),
            outstanding_bytes=0,
            registered_bytes=sum(one.size_bytes for one in self._registrations.values()),
            peers=len(self._peers),
            progress_tokens=self.num_progress,
            progress_calls=0,
            unreleased_handles=0,
            retired_agents=self._num_recycled,
            retired_at=0.0,
        )

    @property
    def is_driven(self) -> bool:
        return self.num_progress > 0 or bool(self._jobs)

    def _end_progress(self) -> None:
        self.num_progress -= 1

    def _abort(self, job: _Job) -> None:
        job.is_aborted = True
        self._end_if_done(job)

    def _recycle(self, done: Future[int]) -> None:
        if not self.process.is_alive:
            return
        num_handles = 0
        self._num_recycled += 1
        self._is_held = False
        for job in list(self._jobs):
            if job.posted:
                num_handles += len(job.posted)
                job.error = job.error or TransferFailed("the transport was made anew")
                self._end(job)
            else:
                self._post(job)
        done.set_result(num_handles)

    def _post(self, job: _Job) -> None:
        delay_s = self._fabric.part_s
        posts = not (job.is_aborted or job.error or self._is_held)
        while posts and job.parts and len(job.posted) < MOST_POSTED:
            local, remote = job.parts.pop(0)
            job.posted.append(local)
            delay = self._world.luck.delay_s(delay_s)
            self._world.after(delay, self._land, job, local, remote, False)
        self._end_if_done(job)

    def _land(self, job: _Job, local: Rows, remote: Rows, has_seen_death: bool) -> None:
        if job.has_ended or not self.process.is_alive:
            return
        source = self._fabric.transports[job.peer]
        if not source.process.is_alive:
            if has_seen_death:
                job.error = job.error or _lost(job.peer)
                self._terminate(job, local)
            else:
                self._world.after(KILLED_S, self._land, job, local, remote, True)
            return
        if self._is_stalled(source):
            self._world.after(STALLED_LOOK_S, self._land, job, local, remote, False)
            return
        if not all(map(source.knows, remote.tolist())):
            job.error = job.error or TransferFailed("the memory is not registered there")
        else:
            self._copy(local, remote)
            job.num_bytes += int(local[:, 1].sum())
            job.num_slices += 1
        self._terminate(job, local)

    def _is_stalled(self, source: "SimTransport") -> bool:
        ours, theirs = self.process, source.process
        cut = self._fabric.network.is_cut(ours.machine, theirs.machine)
        return cut or ours.loop.is_frozen or theirs.loop.is_frozen or not source.is_driven

    def knows(self, row: list[int]) -> bool:
        address, length = row[0], row[1]
        return any(
            one.address <= address and address + length <= one.address + one.size_bytes
            for one in self._registrations.values()
        )

    def _copy(self, local: Rows, remote: Rows) -> None:
        for target, source in zip(local.tolist(), remote.tolist(), strict=True):
            if not self.knows(target):
                self._world.fail(f"{self.process.name}: bytes land where nothing is registered")
            ctypes.memmove(target[0], source[0], target[1])
        if self._world.luck.chance(self._fabric.flips):
            ctypes.c_uint8.from_address(int(local[0, 0])).value ^= 1

    def _terminate(self, job: _Job, local: Rows) -> None:
        job.posted = [rows for rows in job.posted if rows is not local]
        self._post(job)

    def _end_if_done(self, job: _Job) -> None:
        if not job.posted and (job.is_aborted or job.error or not job.parts):
            self._end(job)

    def _end(self, job: _Job) -> None:
        if job.has_ended:
            return
        job.has_ended = True
        self._jobs.discard(job)
        status = ReadStatus.DONE
        if job.error is not None:
            status = ReadStatus.FAILED
        elif job.is_aborted:
            status = ReadStatus.ABORTED
        outcome = ReadOutcome(
            status=status,
            error=job.error,
            num_bytes=job.num_bytes,
            num_slices=job.num_slices,
        )
        self.process.loop.call_soon(job.on_end, outcome)


def _lost(peer: str) -> PeerLost:
    return PeerLost("the peer of a READ is gone", peer=peer)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _blob(name: str) -> bytes:
    """The fields that `PeerMetadata` reads, and no memory."""

    def of(tag: bytes, content: bytes) -> bytes:
        return tag + len(content).to_bytes(8, "little") + content + b"|"

    contact = of(b"Agent", name.encode()) + of(b"Conns", (1).to_bytes(8, "little"))
    contact += of(b"t", b"UCX") + of(b"c", b"\0")
    memory = of(b"", b"MemSection") + of(b"nixlSecElms", (0).to_bytes(8, "little"))
    return b"nixlSerDes|" + contact + memory
