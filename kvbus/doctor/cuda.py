"""Says whether torch sees the NVIDIA GPUs, and whether two processes can share their memory.

Refuses to import torch, and to complain where there is no GPU: kvbus works from host memory.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbus.doctor.children import PROBE, Budget, run_alone, run_pair
from kvbus.doctor.finding import NOTE, OK, WARNING, Finding
from kvbus.doctor.host import text_of
from kvbus.doctor.process import GpuList
from kvbus.doctor.versions import installed

_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WHY = "KV in GPU memory reaches an agent by CUDA IPC; KV in host memory needs none of it."


def check_cuda(budget: Budget) -> Iterator[Finding]:
    """GPUs, IPC, the allocator; one note where there is no GPU.

    The driver's devices count, visible to torch or not.
    """
    num_devices = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    torch_version = installed("torch") or ""
    if num_devices == 0:
        yield no_gpu_finding(torch_version)
        return
    listed = run_alone(PROBE, "cuda", "list", env={}, budget=budget)
    seen, error = listed.answer(GpuList, GpuList("", ()))
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text_of("/proc/driver/nvidia/version"))
    yield gpus_finding(
        seen,
        error,
        num_devices=num_devices,
        driver=driver[0] if driver else "",
        torch_version=torch_version,
    )
    if seen.gpus:
        yield ipc_finding(run_pair(PROBE, "cuda", env={}, budget=budget).failure)
    settings = (os.environ[key] for key in _ALLOCATOR_KEYS if key in os.environ)
    yield allocator_finding(next(settings, ""))


def no_gpu_finding(torch_version: str) -> Finding:
    """The one of a machine without any."""
    found = "CUDA was not checked: there is no NVIDIA GPU here"
    return Finding("cuda.gpus", NOTE, found, {"gpus": [], "torch_version": torch_version})


def gpus_finding(
    seen: GpuList, error: str, *, num_devices: int, driver: str, torch_version: str
) -> Finding:
    """``error`` says why torch saw none of the driver's devices."""
    names = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in seen.gpus)
    found = f"{names}; driver {driver or '?'}, CUDA {seen.cuda_version or '?'} of torch"
    if not seen.gpus:
        found = f"the driver has {num_devices} GPUs, torch {torch_version or '?'} sees "
        found += f"none: {error}"
    return Finding(
        "cuda.gpus",
        OK if seen.gpus else WARNING,
        found,
        {
            "driver": driver,
            "torch_version": torch_version,
            "cuda_version": seen.cuda_version,
            "gpus": [msgspec.structs.asdict(gpu) for gpu in seen.gpus],
        },
        why=_WHY,
        fix="Install a torch that is built for CUDA and fits the driver, and look at "
        "CUDA_VISIBLE_DEVICES.",
        command="python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'",
    )


def ipc_finding(error: str) -> Finding:
    """``error`` says why another process could not open memory, empty when it could."""
    works = "memory of one process was opened and read by another"
    return Finding(
        "cuda.ipc",
        WARNING if error else OK,
        f"CUDA IPC between two processes fails: {error}" if error else works,
        {"error": error},
        why=_WHY,
        fix="Run engine and agent where both see the GPU and each other: one IPC and PID "
        "namespace (docker --ipc=host --pid=host), and no expandable segments.",
    )


def allocator_finding(setting: str) -> Finding:
    """Torch's setting of its allocator."""
    is_expandable = "expandable_segments:true" in setting.lower().replace(" ", "")
    found = f"expandable segments are on ({setting})" if is_expandable else setting
    return Finding(
        "cuda.allocator",
        WARNING if is_expandable else OK,
        found or "torch's own settings",
        {"setting": setting},
        why="Memory in expandable segments cannot be exported as plain CUDA IPC handles.",
        fix="Turn them off (expandable_segments:False) for engines with KV in GPU memory.",
    )
