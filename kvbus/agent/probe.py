"""Two short-lived processes that measure what would be too dangerous here.

    target ──what it has──▶ reader ──▶ its stdout

Stdin of each is a socket to the other one. A crash ends only its own process.
"""

import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from kvbus.data.messages import UCX_ONLY, Backends
from kvbus.errors import ConfigError, ErrorCode
from kvbus.spawn import Child

READ_WITHIN_S = 20.0
CAUSE_WITHIN_S = 1.0
LET_NICS_READ = (
    "The kernel must let the NIC read the GPU: load nvidia_peermem, or use NVIDIA's open kernel "
    "modules, which have DMA-BUF; see that UCX_TLS leaves UCX its CUDA and RDMA transports. "
    "kvbus doctor measures it."
)
MAX_REASON_LETTERS = 300
NO_SETTINGS: Mapping[str, str] = {}
_LOGGED = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "info",
    "UCX_LOG_FILE": "stderr",
    "UCX_PROTO_INFO": "y",
}
_ANY_PORT = {"UCX_TCP_PORT_RANGE": "0"}
"""The agent may need all ports of its range."""
_READ_TABLE = "remote memory read by ucp_get"
_EMULATED = "software emulation"
_UCX_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_UCX_ERROR = re.compile(r"UCX\s+ERROR\s+(.+)")
_NIXL_ERROR = re.compile(r"^E\d{4} \S+\s+\d+ \S+?:\d+\] (.+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PairResult:
    """``error`` is empty if the reader has succeeded."""

    answer: str
    log: str
    error: str


@dataclass(frozen=True, slots=True)
class MeasuredRead:
    """``bytes_per_s`` is 0 for a failure."""

    bytes_per_s: float
    wire: str = ""
    is_emulated: bool = False
    error: str = ""
    ucx_version: str = ""


async def measure_vram_read(
    gpu: str,
    *,
    over_ipc: bool = False,
    limit_s: float = READ_WITHIN_S,
    backends: Backends = UCX_ONLY,
) -> MeasuredRead:
    """Read from the GPU to itself; without ``over_ipc``, as if from another machine."""
    tls = os.environ.get("UCX_TLS", "")
    return await measure_read(
        gpu,
        limit_s=limit_s,
        tls=tls if over_ipc else _without_ipc(tls),
        backends=backends,
        env=_ANY_PORT,
    )


async def measure_read(
    device: str,
    *,
    limit_s: float,
    tls: str = "",
    backends: Backends = UCX_ONLY,
    env: Mapping[str, str] = NO_SETTINGS,
) -> MeasuredRead:
    """Read from a GPU to itself, or from host memory, with the first backend."""
    env = {**_LOGGED, **env, **({"UCX_TLS": tls} if tls else {})}
    arguments = msgspec.json.encode(backends).decode(), device
    pair = await run_pair("kvbus.data.bare_agent", *arguments, limit_s=limit_s, env=env)
    wire, is_emulated = wire_in(pair.log)
    version = _UCX_VERSION.search(pair.log)
    speed = 0.0 if pair.error else float(pair.answer)
    return MeasuredRead(speed, wire, is_emulated, pair.error, version[1] if version else "")


def wire_in(log: str) -> tuple[str, bool]:
    """Return the transport of large UCX reads, such as ``cma/memory``, and if it is emulated."""
    wire, is_emulated, is_read = "", False, False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_read = cells[0].startswith(_READ_TABLE)
        elif is_read and cells and cells[0].endswith("inf"):
            wire, is_emulated = cells[-1], cells[-2].startswith(_EMULATED)
    return wire, is_emulated


def _without_ipc(tls: str) -> str:
    if tls in ("", "all"):
        return "^cuda_ipc"
    if tls.startswith("^"):
        return f"{tls},cuda_ipc"
    kept = {"cuda": ("cuda_copy", "gdr_copy"), "cuda_ipc": ()}
    return ",".join(one for name in tls.split(",") for one in kept.get(name, (name,)))


async def run_pair(
    module: str, *arguments: str, limit_s: float, env: Mapping[str, str] | None = None
) -> PairResult:
    """Run ``python -m module ARGUMENTS target`` and ``… reader``, which prints the answer."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        async with _started(command, env or {}) as pair:
            return await _result(*pair, limit_s)
    except (ConfigError, OSError) as error:
        return PairResult("", "", f"no process can be started: {error}")


async def _result(target: "_Process", reader: "_Process", limit_s: float) -> PairResult:
    """The first process that fails is the cause."""
    decisive: list[_Process] = []
    async with anyio.create_task_group() as tasks:

        async def watch(one: _Process) -> None:
            if await one.child.ended() or one is reader:
                decisive.append(one)
                tasks.cancel_scope.cancel()

        tasks.cancel_scope.deadline = anyio.current_time() + limit_s
        for process in (target, reader):
            tasks.start_soon(watch, process)
    if not decisive:
        return PairResult("", reader.log, f"no answer within {limit_s:.3g} s")
    if decisive[0] is reader and str(ErrorCode.PEER_LOST) in reader.log:  # it may see it earlier
        with anyio.move_on_after(CAUSE_WITHIN_S):
            if await target.child.ended():
                return _failed(target)
    if decisive[0].child.process.returncode:
        return _failed(decisive[0])
    return PairResult(reader.answer, reader.log, "")


class _Process:
    """Its log and its answer need no file system, as an event loop must not wait for one."""

    def __init__(
        self, command: Sequence[str], role: str, sock: socket.socket, env: Mapping[str, str]
    ) -> None:
        with ExitStack() as undo:
            log, self._answer = (_memory_file(role, undo) for _ in range(2))
            self.child = Child.start(
                f"{role} of the probe",
                [*command, role],
                log=Path(f"/proc/self/fd/{log}"),
                stdin=sock.fileno(),
                stdout=self._answer,
                env=env,
                own_session=True,
            )
            self._close = undo.pop_all().close

    @property
    def log(self) -> str:
        return self.child.log_text()

    @property
    def answer(self) -> str:
        size_bytes = os.fstat(self._answer).st_size
        return os.pread(self._answer, size_bytes, 0).decode()

    async def end(self) -> None:
        await self.child.end_async()
        self._close()


def _memory_file(name: str, undo: ExitStack) -> int:
    fd = os.memfd_create(f"kvbus-probe-{name}")
    undo.callback(os.close, fd)
    return fd


@asynccontextmanager
async def _started(
    command: Sequence[str], env: Mapping[str, str]
) -> AsyncIterator[tuple[_Process, _Process]]:
    target, reader = socket.socketpair()
    processes: list[_Process] = []
    try:
        with target, reader:
            processes += [_Process(command, "target", target, env)]
            processes += [_Process(command, "reader", reader, env)]
        yield processes[0], processes[1]
    finally:
        for one in processes:
            await one.end()


def _failed(one: _Process) -> PairResult:
    head, _, tail = one.child.lost().message.partition("; the last lines of its log:")
    log = one.log
    reasons = [found[1] for line in (_UCX_ERROR, _NIXL_ERROR) if (found := line.search(log))]
    reasons += [line.strip() for line in tail.splitlines()[-1:]]
    reason = ": ".join([head, *reasons[:1]])[:MAX_REASON_LETTERS].replace("\n", " ")
    return PairResult("", log, reason)
