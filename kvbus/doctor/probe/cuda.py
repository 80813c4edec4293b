"""Looks for NVIDIA GPUs, and has torch tried with them in processes of its own.

Refuses to start torch where the machine has no GPU.
"""

import os
import re
from pathlib import Path

import msgspec

from kvbus.doctor.judge.cuda import CudaFacts, Gpu
from kvbus.doctor.probe.children import Budget, Ended, run_alone, run_pair
from kvbus.doctor.probe.versions import installed_version

LIST_MODULE = "kvbus.doctor.probe.cuda_list_process"
IPC_MODULE = "kvbus.doctor.probe.cuda_ipc_process"
_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Seen(msgspec.Struct, frozen=True):
    """What the listing process prints: uuid, name and bytes of each GPU."""

    cuda_version: str
    gpus: list[tuple[str, str, int]]


def cuda_facts(budget: Budget) -> CudaFacts:
    """The GPUs, and whether two processes can share the memory of the first."""
    num_devices = _num_devices()
    seen, error, ipc_error = Seen("", []), "", ""
    if num_devices:
        seen, error = _seen(run_alone(LIST_MODULE, env={}, budget=budget))
    if seen.gpus:
        ipc_error = run_pair(IPC_MODULE, env={}, budget=budget).failure
    return CudaFacts(
        num_devices=num_devices,
        driver=_driver(),
        torch_version=installed_version("torch") or "",
        cuda_version=seen.cuda_version,
        gpus=tuple(Gpu(uuid=gpu[0], name=gpu[1], memory_bytes=gpu[2]) for gpu in seen.gpus),
        survey_error=error,
        ipc_error=ipc_error,
        allocator=next((os.environ[key] for key in _ALLOCATOR_KEYS if key in os.environ), ""),
    )


def _seen(ended: Ended) -> tuple[Seen, str]:
    if ended.failure:
        return Seen("", []), ended.failure
    try:
        return msgspec.json.decode(ended.output, type=Seen), ""
    except msgspec.DecodeError:
        return Seen("", []), "it answered something else"


def _num_devices() -> int:
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""
