"""Looks for NVIDIA GPUs, and has torch tried with them in processes of its own.

Refuses to start torch where the machine has no GPU.
"""

import os
import re
from pathlib import Path

import msgspec

from kvbus.doctor.check.cuda import CudaFacts, Gpu
from kvbus.doctor.probe.children import Budget, run_alone, run_pair
from kvbus.doctor.probe.host import installed_version

MODULE = "kvbus.doctor.probe.cuda_process"
_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class GpuList(msgspec.Struct, frozen=True):
    """What the listing process prints."""

    cuda_version: str
    gpus: tuple[Gpu, ...]


def cuda_facts(budget: Budget) -> CudaFacts:
    """The GPUs, and whether two processes can share the memory of the first."""
    num_devices = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    seen, error, ipc_error = GpuList("", ()), "", ""
    if num_devices:
        seen, error = _list_gpus(budget)
    if seen.gpus:
        ipc_error = run_pair(MODULE, env={}, budget=budget).failure
    return CudaFacts(
        num_devices=num_devices,
        driver=_driver(),
        torch_version=installed_version("torch") or "",
        cuda_version=seen.cuda_version,
        gpus=seen.gpus,
        survey_error=error,
        ipc_error=ipc_error,
        allocator=next((os.environ[key] for key in _ALLOCATOR_KEYS if key in os.environ), ""),
    )


def _list_gpus(budget: Budget) -> tuple[GpuList, str]:
    ended = run_alone(MODULE, "list", env={}, budget=budget)
    if ended.failure:
        return GpuList("", ()), ended.failure
    try:
        return msgspec.json.decode(ended.output, type=GpuList), ""
    except msgspec.DecodeError:
        return GpuList("", ()), "the process that lists GPUs did not answer with a list"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""
