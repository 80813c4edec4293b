"""Processes that do what may hang or crash, and say why they failed as their last line.

    probe nixl|cuda list      prints what there is
    probe nixl|cuda target    prints where its memory is, and stays until its stdin ends
    probe nixl|cuda reader    takes that line from its stdin and reads there; nixl prints its rate

No probe outlives `run_alone` and `run_pair`: one that does not end in time is killed.
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from kvbus.errors import KVBusError
from kvbus.spawn import Child, Stream

GENTLE_END_S = 1.0
LEAST_S = 0.05
MAX_REASON_LETTERS = 300
_UCX_ERROR = re.compile(r"UCX\s+ERROR\s+(.+)")
_NIXL_ERROR = re.compile(r"^E\d{4} \S+\s+\d+ \S+?:\d+\] (.+)", re.MULTILINE)
_LentMemory = tuple[str, bytes, int, int]
"""Memory of a GPU that another process can open: its device, handle, offset and size."""
_NUM_SHARED, _MARK = 1 << 20, 42

T = TypeVar("T")


class NixlList(msgspec.Struct, frozen=True):
    """What NIXL has: memory types by backend, none of one that cannot be loaded."""

    nixl_version: str = ""
    backends: dict[str, tuple[str, ...]] = {}


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as torch sees it."""

    uuid: str
    name: str
    memory_bytes: int


class GpuList(msgspec.Struct, frozen=True):
    """What torch sees."""

    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()


class Budget:
    """Time that probes share: ``total_s`` for all of them, ``each_s`` for any one."""

    def __init__(self, total_s: float, each_s: float) -> None:
        self._ends_at = time.monotonic() + total_s
        self._each_s = each_s

    def next_s(self) -> float:
        """How long the next probe may take."""
        return max(LEAST_S, min(self._each_s, self._ends_at - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a probe ended: its stdout, what it logged, and why it failed, empty when it did not."""

    output: str
    log: str
    failure: str

    def answer(self, kind: type[T], nothing: T) -> tuple[T, str]:
        """What it printed, or ``nothing`` and why."""
        if self.failure:
            return nothing, self.failure
        try:
            return msgspec.json.decode(self.output, type=kind), ""
        except msgspec.DecodeError:
            return nothing, "it answered something else"


def run_alone(kind: str, budget: Budget, env: Mapping[str, str]) -> Ended:
    """Have a probe list what there is."""
    with tempfile.TemporaryDirectory(prefix="kvbus-doctor-") as folder:
        probe = _start(kind, "list", Path(folder), env)
        try:
            return _ended(probe, budget.next_s())
        finally:
            probe.end(GENTLE_END_S)


def run_pair(kind: str, budget: Budget, env: Mapping[str, str]) -> Ended:
    """Have one probe read what another one has; how the reader ended.

    Both write one log, which is read before the target is told to end: the first reason is the one
    of who failed first. A reader that is told nothing has no reason of its own.
    """
    limit_s = budget.next_s()
    with tempfile.TemporaryDirectory(prefix="kvbus-doctor-") as folder:
        target = _start(kind, "target", Path(folder), env)
        try:
            # Its stdout stays open here, too: its line may come after a reader that has failed.
            reader = _start(kind, "reader", Path(folder), env, stdin=target.process.stdout)
            try:
                ended = _ended(reader, limit_s)
            finally:
                reader.end(GENTLE_END_S)
            if ended.failure and not reason_in(ended.log):  # the target crashed without a word
                return replace(ended, failure=_why(target.end(GENTLE_END_S), ended.log))
            return ended
        finally:
            target.end(GENTLE_END_S)


def _start(
    kind: str, role: str, folder: Path, env: Mapping[str, str], stdin: Stream = subprocess.PIPE
) -> Child:
    command = [sys.executable, "-m", __name__, kind, role]
    pipe = subprocess.PIPE
    return Child.start("probe", command, log=folder / "log", stdin=stdin, stdout=pipe, env=env)


def _ended(probe: Child, limit_s: float) -> Ended:
    """Its end, in time or by force."""
    try:
        output, _ = probe.process.communicate(timeout=limit_s)
    except BaseException as error:
        probe.process.kill()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        slow = f"no answer within {limit_s:.3g} s; --timeout gives more"
        return Ended("", probe.log_text(), slow)
    log, status = probe.log_text(), probe.process.returncode
    return Ended(output.decode(errors="replace"), log, _why(status, log) if status else "")


def _why(status: int, log: str) -> str:
    reason = reason_in(log)
    if status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
        return f"{ending}: {reason}" if reason else ending
    return reason or f"ended with status {status}"


def reason_in(log: str) -> str:
    """The first error that UCX told, or else NIXL, or else the last line, which is Python's."""
    for pattern in (_UCX_ERROR, _NIXL_ERROR):
        if found := pattern.search(log):
            return found[1].strip()[:MAX_REASON_LETTERS]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:MAX_REASON_LETTERS] if lines else ""


# What a probe does. What may crash is imported by the probe alone.


def _probe_nixl(role: str) -> None:
    from kvbus.lab.bare_pair import LONG_BYTES, NUM_PLACES, BareAgent  # noqa: PLC0415
    from kvbus.transport.nixl_agent import list_backends  # noqa: PLC0415

    if role == "list":
        _print(NixlList(*list_backends()))
        return
    agent = BareAgent(f"kvbus-doctor-{role}", NUM_PLACES * LONG_BYTES)
    if role == "target":
        agent.serve()
    else:
        agent.connect()
        _print(agent.bytes_per_s())


def _probe_cuda(role: str) -> None:
    from kvbus.memory import cuda  # noqa: PLC0415 - torch

    if role == "list":
        version, gpus = cuda.seen_gpus()
        _print(GpuList(version, tuple(Gpu(*gpu) for gpu in gpus)))
    elif role == "target":
        memory = cuda.allocate_cuda(_NUM_SHARED, "cuda:0")
        memory.tensor.fill_(_MARK)[0].item()  # waits for the GPU
        _print((memory.device, memory.handle, memory.offset_bytes, memory.size_bytes))
        sys.stdin.read()
    else:
        line = sys.stdin.readline() or sys.exit(1)
        device, handle, first, size = msgspec.json.decode(line, type=_LentMemory)
        with cuda.CudaMapping(device, handle, offset_bytes=first, size_bytes=size) as mapping:
            if not (mapping.view()[:_NUM_SHARED] == _MARK).all():
                sys.exit("it read other bytes than the target has")


def _print(answer: object) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        {"nixl": _probe_nixl, "cuda": _probe_cuda}[sys.argv[1]](sys.argv[2])
    except KVBusError as error:
        sys.exit(error.message)
    except (OSError, RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        sys.exit(" ".join(str(error).split()))
