"""Checks of the data plane: speed and transport of NIXL, and memory sharing of GPUs.

Two processes measure both, so that a crash ends only its own process.

doctor ──lend──▶ target ──▶ where its memory is ──measure──▶ reader ──▶ what it found

    python -m kvbus.doctor.data_plane nixl|cuda target|reader
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import msgspec

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.doctor.host import installed, rdma_devices, text_of
from kvbus.errors import KVBusError, LocalError, leaves
from kvbus.lab.process import engine_process, run_program, serve
from kvbus.memory.gpu_source import GpuSource
from kvbus.output import waiting_for
from kvbus.text import rate_text

CONFIGURED, TCP, RDMA = "configured", "tcp", "rdma"
UCX_TLS = {TCP: "tcp", RDMA: "ib"}
WHY_AND_FIX = {
    CONFIGURED: (
        "Agents that are started from here move all bytes with NIXL and UCX, and cannot read.",
        "Install NIXL as required, see versions.nixl; of several installations of UCX, "
        "LD_LIBRARY_PATH may have chosen another. Check the UCX_ settings of the environment; "
        "without any, UCX chooses. "
        "UCX_TLS=sm,self cannot work, as shared memory alone cannot report a dead peer: add tcp.",
    ),
    TCP: (
        "TCP is the way to other machines where there is no RDMA.",
        "See that a network interface is up (lo for agents of one machine) and that "
        "UCX_NET_DEVICES names one that is there.",
    ),
    RDMA: (
        "There are RDMA devices, and agents would not use them.",
        "See limits.locked_memory; check the port (ibv_devinfo), and that /dev/infiniband "
        "is in the container.",
    ),
}
_LOGGED = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "info",
    "UCX_LOG_FILE": "stderr",
    "UCX_PROTO_INFO": "y",
}
_UCX_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_READ_TABLE = "remote memory read by ucp_get"
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
MAX_REASON_LETTERS = 300
_UCX_ERROR = re.compile(r"UCX\s+ERROR\s+(.+)")
_NIXL_ERROR = re.compile(r"^E\d{4} \S+\s+\d+ \S+?:\d+\] (.+)", re.MULTILINE)
_NUM_SHARED, _MARK = 1 << 20, 42

T = TypeVar("T")


class LentGpuMemory(msgspec.Struct, frozen=True):
    cuda_version: str
    gpus: tuple[tuple[str, str, int], ...]
    """UUID, name and bytes."""
    source: GpuSource
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PairResult(Generic[T]):
    log: str
    answer: T | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """``bytes_per_s`` is 0 for a failure; ``ucx_tls`` is empty if UCX chose."""

    way: str
    ucx_tls: str
    bytes_per_s: float
    wire: str = ""
    error: str = ""
    ucx_version: str = ""


def check_nixl(limit_s: float) -> Iterator[Finding]:
    for way in WHY_AND_FIX:
        if way == RDMA and not rdma_devices():
            continue
        tls = UCX_TLS.get(way, os.environ.get("UCX_TLS", ""))
        env = {**_LOGGED, "UCX_TLS": tls} if tls else _LOGGED
        with waiting_for(f"a NIXL READ, {way}"):
            ended = _run_pair("nixl", float, limit_s, env)
        version = _UCX_VERSION.search(ended.log)
        yield read_finding(
            ReadSpeed(
                way,
                tls,
                ended.answer or 0.0,
                wire_in(ended.log),
                ended.failure,
                version[1] if version else "",
            )
        )


def wire_in(log: str) -> str:
    """Return the transport of large UCX reads, such as ``cma/memory``."""
    wire, is_read = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_read = cells[0].startswith(_READ_TABLE)
        elif is_read and cells and cells[0].endswith("inf"):
            wire = cells[-1]
    return wire


def read_finding(one: ReadSpeed, ptrace_scope: str | None = None) -> Finding:
    """Return an error if the configured read fails, a warning if agents would read over TCP."""
    setting = f"UCX_TLS={one.ucx_tls}" if one.ucx_tls else "UCX_TLS is not set"
    (why, fix), command, severity = WHY_AND_FIX[one.way], "", OK
    found = f"{rate_text(one.bytes_per_s)} over {one.wire or 'what UCX chose'} ({setting})"
    if not one.bytes_per_s:
        found = f"fails ({setting}): {one.error}"
        severity = ERROR if one.way == CONFIGURED else WARNING
        command = "env | grep ^UCX_" if one.way == CONFIGURED else ""
    elif one.way == CONFIGURED and "tcp/" in one.wire:  # also as one of several
        severity = WARNING
        why = "Agents of this machine whose memory is not mapped read at a fraction of the speed."
        fix, command = _fix_of_tcp(ptrace_scope or text_of(_PTRACE_SCOPE).strip(), one.ucx_tls)
    return Finding(
        f"nixl.read.{one.way}",
        severity,
        found,
        {
            "ucx_tls": one.ucx_tls,
            "bytes_per_s": one.bytes_per_s or None,
            "wire": one.wire,
            "error": one.error,
            "ucx_version": one.ucx_version,
        },
        why=why,
        fix=fix,
        command=command,
    )


def _fix_of_tcp(ptrace_scope: str, ucx_tls: str) -> tuple[str, str]:
    if ucx_tls:
        return "Let UCX use shared memory: UCX_TLS unset, or with sm.", "unset UCX_TLS"
    if ptrace_scope not in ("", "0", "1"):
        fix = f"Set kernel.yama.ptrace_scope, which is {ptrace_scope}, to 1 or 0."
        return fix, "sysctl kernel.yama.ptrace_scope=1"
    return (
        "Let processes read each other's memory: docker --cap-add SYS_PTRACE, or a seccomp profile "
        "with process_vm_readv; agents in different containers need one PID namespace.",
        "",
    )


def check_cuda(limit_s: float) -> Iterator[Finding]:
    """torch may not see the GPUs of the driver."""
    num_devices = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    if num_devices == 0:
        yield Finding("cuda.ipc", NOTE, "CUDA was not checked: there is no NVIDIA GPU here")
        return
    with waiting_for("two processes to share memory of a GPU"):
        ended = _run_pair("cuda", LentGpuMemory, limit_s, {})
    yield ipc_finding(ended.answer, ended.failure, num_devices=num_devices)


def ipc_finding(read: LentGpuMemory | None, error: str, *, num_devices: int) -> Finding:
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text_of("/proc/driver/nvidia/version"))
    torch_version = installed("torch") or "?"
    versions = f"driver {driver[0] if driver else '?'}, torch {torch_version}"
    found = f"CUDA IPC fails, with {num_devices} GPUs of the driver ({versions}): {error}"
    if read:
        names = ", ".join(f"{name} {uuid}" for uuid, name, _ in read.gpus)
        versions += f", CUDA {read.cuda_version}"
        found = f"CUDA IPC works between two processes; {names} ({versions})"
    return Finding(
        "cuda.ipc",
        OK if read else WARNING,
        found,
        {"error": error, "versions": versions, "gpus": read.gpus if read else ()},
        why="KV in GPU memory reaches an agent by CUDA IPC; KV in host memory needs none of it.",
        fix="Install a torch for CUDA that fits the driver, and check CUDA_VISIBLE_DEVICES. Run "
        "engine and agent in one IPC and PID namespace (docker --ipc=host --pid=host), without "
        "expandable segments in PYTORCH_CUDA_ALLOC_CONF.",
        command="python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'",
    )


def _run_pair(kind: str, answer: type[T], limit_s: float, env: Mapping[str, str]) -> PairResult[T]:
    answers, failure = list[T](), ""
    with tempfile.TemporaryDirectory(prefix="kvbus-doctor-") as folder:
        log = Path(folder) / "log"
        try:
            answers.append(anyio.run(_read, kind, answer, limit_s, env, log))
        except* KVBusError as errors:
            failure = _why(leaves(errors)[0], log.read_text(errors="replace"))
        except* TimeoutError:
            failure = f"no answer within {limit_s:.3g} s; --timeout gives more"
        text = log.read_text(errors="replace")
    return PairResult(text, failure=failure) if failure else PairResult(text, answers[0])


async def _read(kind: str, answer: type[T], limit_s: float, env: Mapping[str, str], log: Path) -> T:
    start = partial(engine_process, log=log, env=env)
    with anyio.fail_after(limit_s):
        async with (
            start(f"{kind} target", "kvbus.doctor.data_plane", kind, "target") as target,
            start(f"{kind} reader", "kvbus.doctor.data_plane", kind, "reader") as reader,
        ):
            lent = await target.request(dict[str, Any], "lend")
            return await reader.request(answer, "measure", **lent)


def _why(error: KVBusError, log: str) -> str:
    head, _, tail = error.message.partition("; the last lines of its log:")
    reasons = [found[1] for one in (_UCX_ERROR, _NIXL_ERROR) if (found := one.search(log))]
    reasons += tail.splitlines()[-1:]
    return ": ".join([head, *reasons[:1]])[:MAX_REASON_LETTERS].replace("\n", " ")


class CudaMemory:
    def lend(self) -> LentGpuMemory:
        from kvbus.memory import cuda  # noqa: PLC0415 - its driver may crash

        self._lent = cuda.GpuAllocation(_NUM_SHARED, 0)
        cuda.write_bytes(0, self._lent.address, bytes([_MARK]) * _NUM_SHARED)
        with self._lent.memory.exported() as (source, _):
            gpus = tuple(cuda.seen_gpus())
            return LentGpuMemory(cuda.driver_version(), gpus, source, _NUM_SHARED)

    def measure(self, **lent: Any) -> LentGpuMemory:
        from kvbus.memory import cuda  # noqa: PLC0415 - its driver may crash

        seen = msgspec.convert(lent, LentGpuMemory)
        with cuda.CudaMapping(seen.source, seen.size_bytes) as mapping:
            content = cuda.read_bytes(mapping.ordinal, mapping.address, mapping.size_bytes)
            if set(content) != {_MARK}:
                raise LocalError("it read other bytes than the target has")
        return seen


def _be(kind: str) -> object:
    """Import modules that may crash in the probe process only."""
    if kind == "cuda":
        return CudaMemory()
    from kvbus.lab.bare_pair import BareAgent  # noqa: PLC0415

    return BareAgent()


if __name__ == "__main__":
    run_program(partial(serve, _be(sys.argv[1])))
    os._exit(0)  # remaining NIXL threads may hang in its destructors
