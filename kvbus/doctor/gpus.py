"""Checks of GPUs: driver, shared memory, and READs between their memory."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec

from kvbus.agent.probe import LET_NICS_READ, MeasuredRead, measure_vram_read, run_pair
from kvbus.doctor.finding import NOTE, OK, WARNING, Finding
from kvbus.doctor.gpu_pair import GpuFacts, GpuReport, Shared
from kvbus.doctor.host import rdma_devices, text_of
from kvbus.memory.nvidia import finds_driver
from kvbus.output import waiting_for
from kvbus.text import bytes_text, rate_text

_NO_GPU = "CUDA_ERROR_NO_DEVICE"
_HOSTS_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO
_DRIVER = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
WHY_SHARED = "KV in GPU memory reaches an agent in this way; KV in host memory needs none of it."


def check_gpus(limit_s: float) -> Iterator[Finding]:
    num_devices = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    if not num_devices and not finds_driver():
        yield _none_here()
        return
    with waiting_for("two processes to share memory of a GPU"):
        pair = anyio.run(partial(run_pair, "kvbus.doctor.gpu_pair", limit_s=limit_s))
    if pair.error:
        is_quiet = not num_devices and _NO_GPU in pair.error
        yield _none_here() if is_quiet else driver_finding(pair.error, num_devices=num_devices)
        return
    report = msgspec.json.decode(pair.answer, type=GpuReport)
    yield from sharing_findings(report, in_container=_is_in_container())
    gpu, ways = report.gpus[0].name, {"ipc": True, **({"rdma": False} if rdma_devices() else {})}
    for way, over_ipc in ways.items():
        with waiting_for(f"a NIXL READ of GPU memory, {way}"):
            measure = partial(measure_vram_read, gpu, over_ipc=over_ipc, limit_s=limit_s)
            yield vram_finding(way, anyio.run(measure))


def _is_in_container() -> bool:
    return Path("/proc/self/ns/pid").stat().st_ino != _HOSTS_PID_NAMESPACE


def _none_here() -> Finding:
    return Finding("cuda.driver", NOTE, "CUDA was not checked: there is no NVIDIA GPU here")


def driver_finding(problem: str, *, num_devices: int) -> Finding:
    return Finding(
        "cuda.driver",
        WARNING,
        f"CUDA does not work, with {num_devices} GPUs in /dev: {problem}",
        {"error": problem, "driver": _driver_version()},
        why="Engines and agents with KV in GPU memory need the driver's libcuda.so.1.",
        fix="In a container, start it with the GPUs (docker --gpus all; Kubernetes: a limit of "
        "nvidia.com/gpu, or NVIDIA_VISIBLE_DEVICES with the runtime class nvidia) and with the "
        "driver capability compute. Elsewhere, see that the kernel module and libcuda are of one "
        "version, and check CUDA_VISIBLE_DEVICES.",
        command="nvidia-smi",
    )


def _driver_version() -> str:
    found = _DRIVER.search(text_of("/proc/driver/nvidia/version"))
    return found[0] if found else ""


def sharing_findings(report: GpuReport, *, in_container: bool) -> Iterator[Finding]:
    yield _gpus_finding(report)
    if report.kernel_problem:
        yield Finding(
            "cuda.kernels",
            WARNING,
            report.kernel_problem,
            {"error": report.kernel_problem},
            why="Agents refuse engines with KV on this GPU.",
            fix="Install a driver for CUDA 12.0 or later: 525.60 or later. The GPU must be a V100 "
            "or later.",
            command="nvidia-smi",
        )
    yield _ipc_finding(report.ipc)
    yield _descriptors_finding(report.descriptors)
    if in_container:
        yield Finding(
            "cuda.pids",
            NOTE,
            "processes here have a PID namespace",
            why="CUDA IPC fails between two processes with the same PID, each in its own "
            "namespace. Engine and agent need one namespace, as by shareProcessNamespace in a pod, "
            "or docker --pid.",
        )
    yield from _limits_of(report.gpus)


def _gpus_finding(report: GpuReport) -> Finding:
    seen = [f"{one.model} {one.name}, {bytes_text(one.size_bytes)}" for one in report.gpus]
    version = f"driver {_driver_version() or '?'}, CUDA {report.cuda_version}"
    is_mig = any(one.name.startswith("MIG-") for one in report.gpus)
    return Finding(
        "cuda.gpus",
        NOTE if is_mig else OK,
        f"{'; '.join(seen)} ({version})",
        {
            "driver": _driver_version(),
            "cuda": report.cuda_version,
            "gpus": [msgspec.structs.asdict(one) for one in report.gpus],
        },
        why="Memory of an instance under MIG is shared within this instance only: give engine and "
        "agent the same one."
        if is_mig
        else "",
    )


def _ipc_finding(ipc: Shared) -> Finding:
    return Finding(
        "cuda.ipc",
        WARNING if ipc.problem else OK,
        f"CUDA IPC fails: {ipc.problem}" if ipc.problem else "CUDA IPC works between two processes",
        {"error": ipc.problem},
        why=WHY_SHARED,
        fix="Run engine and agent in one IPC and PID namespace, with the same GPUs (docker "
        "--ipc=host --pid=host; in a pod shareProcessNamespace). Where CUDA has no IPC, as in "
        "some virtual machines, let engines allocate with cuMemCreate and POSIX descriptors, if "
        "cuda.descriptors works.",
    )


def _descriptors_finding(parts: Shared) -> Finding:
    return Finding(
        "cuda.descriptors",
        WARNING if parts.problem else OK,
        f"GPU memory cannot be passed by descriptor: {parts.problem}"
        if parts.problem
        else "GPU memory can be passed by descriptor",
        {"error": parts.problem},
        why="KV of engines with expandable segments or a sleep mode reaches an agent in this way.",
        fix="Start engines with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and without a "
        "sleep mode.",
    )


def _limits_of(gpus: Sequence[GpuFacts]) -> Iterator[Finding]:
    if lacking := [one.name for one in gpus if not one.has_sequence_words]:
        yield Finding(
            "cuda.sequence",
            WARNING,
            f"streams of {', '.join(lacking)} cannot write 64-bit words",
            {"gpus": lacking},
            why="Engines report by such a word that KV is computed; without it they must "
            "synchronize before they offer or fetch.",
            fix="Install a driver for CUDA 12.0 or later.",
            command="nvidia-smi",
        )
    apart = [f"{one.name} not {other}" for one in gpus for other in one.inaccessible]
    if apart:
        yield Finding(
            "cuda.peers",
            NOTE,
            f"GPUs that cannot access each other: {'; '.join(apart)}",
            {"pairs": apart},
            why="KV between them passes through host memory. Without NVLink, the IOMMU or PCIe ACS "
            "of a virtual machine or server may forbid it.",
        )


def vram_finding(way: str, read: MeasuredRead) -> Finding:
    found = f"{rate_text(read.bytes_per_s)} from GPU memory over {read.wire or 'what UCX chose'}"
    if read.error:
        found = f"a READ of GPU memory fails: {read.error}"
    elif read.is_emulated:
        found += ", emulated by the CPU"
    why, fix = {
        "ipc": (
            "Agents of one machine that cannot map each other's GPU memory read it slowly.",
            "Leave UCX_CUDA_IPC_ENABLE_GET_ZCOPY and UCX_MEMTYPE_CACHE unset, and CUDA in UCX_TLS. "
            "See cuda.ipc. nixl must be built for the driver's version of CUDA.",
        ),
        "rdma": (
            "The NIC does not read GPU memory: agents copy KV to pinned host memory first.",
            LET_NICS_READ,
        ),
    }[way]
    return Finding(
        f"cuda.read.{way}",
        WARNING if read.error or read.is_emulated else OK,
        found,
        {
            "bytes_per_s": read.bytes_per_s or None,
            "wire": read.wire,
            "is_emulated": read.is_emulated,
            "error": read.error,
        },
        why=why,
        fix=fix,
        command="env | grep ^UCX_",
    )
