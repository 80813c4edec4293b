"""Data processes for tests, spoken to by their channel, and flat memory of engines for them."""

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvbus.data import messages as wire
from kvbus.data.channel import channel_to_data
from kvbus.data.loop import DataLoop
from kvbus.errors import ClosedError
from kvbus.geometry import (
    Axis,
    AxisName,
    BlockTable,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
)
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.segment import SharedSegment
from kvbus.planning import Share
from kvbus.spawn import cpu_s
from tests.support.forked import ForkedData

WITHIN_S = 60.0
GROUP, SEGMENT = "flat", "kv"
MIB = 1 << 20
Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")


@dataclass
class FlatMemory:
    """An engine of one rank: blocks of one token each, so a block table is a list of blocks."""

    engine: EngineSpec
    rank: RankSpec
    segment: "SharedSegment | UnsealedSegment"
    block_bytes: int

    @classmethod
    def of(
        cls, num_blocks: int, block_bytes: int, *, seed: int | None = None, sealed: bool = True
    ) -> "FlatMemory":
        """Zeros, or random bytes of a seed; the owner can truncate it unless it is sealed."""
        group = GroupSpec(GROUP, (0,), 1, 1, block_bytes, "uint8", parts=("latent",))
        sizes = ((AxisName.BLOCK, num_blocks, block_bytes), (AxisName.DIM, block_bytes, 1))
        axes = tuple(Axis(*one) for one in sizes)
        region = Region(SEGMENT, 0, GROUP, (0,), ("latent",), 0, 1, axes)
        size_bytes = num_blocks * block_bytes
        made = cls(
            EngineSpec("engine", "model", 1, (group,)),
            RankSpec(0, (Segment(SEGMENT, size_bytes),), (region,)),
            SharedSegment(size_bytes) if sealed else UnsealedSegment(size_bytes),
            block_bytes,
        )
        if seed is not None:
            content = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
            made.segment.view()[:] = content
            if isinstance(made.segment, UnsealedSegment):
                made.segment.write()
        return made

    @property
    def fd(self) -> int:
        return self.segment.fd

    @property
    def content(self) -> Bytes:
        return self.segment.view()

    @property
    def blocks(self) -> Bytes:
        return self.content.reshape(-1, self.block_bytes)

    def added(self, memory: int, *, direct: bool = True, borrowed: bool = False) -> wire.AddMemory:
        return wire.AddMemory(
            memory=memory,
            engine=self.engine,
            rank=self.rank,
            segments=(wire.SegmentPart(SEGMENT, self.segment.size_bytes),),
            direct=direct,
            borrowed=borrowed,
        )


class UnsealedSegment:
    """A memory file that its owner can truncate; ``view`` is a copy of what was written."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("unsealed")
        os.ftruncate(self.fd, size_bytes)
        self._content = np.zeros(size_bytes, np.uint8)

    def view(self) -> Bytes:
        return self._content

    def write(self) -> None:
        os.pwrite(self.fd, self._content.tobytes(), 0)

    def close(self) -> None:
        os.close(self.fd)


WHOLE = Share(0, 0, GROUP, (0,), ("latent",), 0, 1)


def add_plan(plan: int, source: int, target: int) -> wire.AddPlan:
    return wire.AddPlan(
        plan=plan, sources={0: source}, targets={0: target}, shares=(WHOLE,), groups=(GROUP,)
    )


def moves(source: Sequence[int], target: Sequence[int]) -> dict[str, Any]:
    return {
        "source_tables": {GROUP: BlockTable.of(source)},
        "target_tables": {GROUP: BlockTable.of(target)},
        "spans": {GROUP: (0, len(source))},
    }


class Data:
    """A data process; messages that are not replies are in ``notices``."""

    def __init__(
        self,
        name: str = "data",
        *,
        slice_bytes: int = 8 * MIB,
        copy_threads: int = 1,
        env: Mapping[str, str] | None = None,
        forked: bool = True,
        backends: wire.Backends = wire.UCX_ONLY,
        **options: Any,
    ) -> None:
        self.process: subprocess.Popen[bytes]
        environment = {**os.environ, "UCX_NET_DEVICES": "lo", **(env or {})}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._start(
            theirs, env=environment, start=ForkedData if forked else subprocess.Popen, **options
        )
        self.name = name
        self.channel = channel_to_data(ours)
        self.has_hung_up = False
        self.notices: list[wire.FromData] = []
        self._numbers = itertools.count(1)
        self.replies: dict[int, wire.DataReply] = {}
        self.call(
            wire.Configure(
                nixl_name=name,
                slice_bytes=slice_bytes,
                copy_threads=copy_threads,
                nixl_backends=backends,
            )
        )

    def _start(self, theirs: socket.socket, *, start: Any, **options: Any) -> None:
        command = [sys.executable, "-m", "kvbus.data", "0"]
        with theirs:
            self.process = start(command, stdin=theirs, **options)

    def send(self, message: wire.ToData, fds: Sequence[int] = ()) -> int:
        number = next(self._numbers)
        self.channel.send(structs.replace(message, id=number), fds)
        while self.channel.has_unsent:
            select.select([], [self.channel], [])
            self.channel.flush()
        return number

    def send_raw(self, frame: bytes) -> None:
        with socket.socket(fileno=os.dup(self.channel.fileno())) as sock:
            sock.send(frame)

    def receive(self, pause_s: float = 0.0) -> bool:
        """Take what has come; return whether anything has."""
        select.select([self.channel], [], [], pause_s)
        try:
            received = self.channel.receive()
        except ClosedError:
            self.has_hung_up = True
            return False
        if received is None:
            return False
        message, _ = received
        if isinstance(message, wire.DataReply):
            assert message.to not in self.replies, "one reply to each request"
            self.replies[message.to] = message
        else:
            self.notices.append(message)
        return True

    def has_ended(self, number: int) -> bool:
        while self.receive():
            pass
        return number in self.replies

    def wait(self, number: int) -> wire.DataReply:
        self.until(lambda: number in self.replies)
        return self.replies[number]

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline, "it did not come"
            assert not self.has_hung_up, "the data process has ended"
            self.receive(0.05)

    def result(self, number: int) -> Any:
        reply = self.wait(number)
        if reply.error is not None:
            raise reply.error.error()
        return reply.result

    def call(self, message: wire.ToData, fds: Sequence[int] = ()) -> Any:
        return self.result(self.send(message, fds))

    def do(self, message: wire.ToData) -> wire.DataReply:
        """The reply to a request; an error is one."""
        return self.wait(self.send(message))

    def add(self, memory: int, flat: FlatMemory, **options: bool) -> dict[str, int]:
        added = self.call(flat.added(memory, **options), [flat.fd])
        found: dict[str, int] = added.addresses
        return found

    def metadata(
        self, *memories: int, devices: Sequence[str] = (), backend: str = wire.UCX
    ) -> tuple[bytes, ...]:
        wanted = wire.Metadata(memories=memories, devices=tuple(devices), backend=backend)
        blobs = self.call(wanted)
        found: tuple[bytes, ...] = blobs.blobs
        return found

    def hold(self, memory: int, flat: FlatMemory, *, backend: str = wire.UCX) -> "Held":
        addresses = self.add(memory, flat)
        return Held(self, flat, addresses, self.metadata(memory, backend=backend))

    def meet(self, held: "Held", plan: int, target: int, *, remote: int = 0) -> None:
        """Know the memory of another one, and make a plan from there to ``target``."""
        remote = remote or plan + 100
        self.call(wire.AddPeer(peer=held.data.name, metadata=held.metadata))
        self.call(held.remote(remote))
        self.call(add_plan(plan, remote, target))

    def read(
        self, plan: int, source: Sequence[int], target: Sequence[int], *, priority: int = 0
    ) -> int:
        return self.send(wire.Read(plan=plan, priority=priority, **moves(source, target)))

    def copy(self, plan: int, source: Sequence[int], target: Sequence[int]) -> int:
        return self.send(wire.Copy(plan=plan, turn=wire.Turn("copy"), **moves(source, target)))

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


class DataInThread(Data):
    """A data process as a thread; tests can replace its parts. ``error`` would have ended it."""

    error: Exception | None = None

    def _start(self, theirs: socket.socket, **_: Any) -> None:
        def run() -> None:
            try:
                with theirs, suppress(ClosedError):
                    DataLoop(theirs, BusErrors()).run()
            except RuntimeError as error:
                self.error = error

        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.channel.close()
        self._thread.join(WITHIN_S)


@dataclass
class Held:
    """Memory of a data process that others can read."""

    data: Data
    flat: FlatMemory
    addresses: dict[str, int]
    metadata: tuple[bytes, ...]

    def remote(self, memory: int, *, offset_bytes: int = 0) -> wire.AddRemote:
        return wire.AddRemote(
            memory=memory,
            peer=self.data.name,
            engine=self.flat.engine,
            rank=self.flat.rank,
            addresses={name: at + offset_bytes for name, at in self.addresses.items()},
        )
