"""Owns what is said about NVIDIA GPUs: does torch see them, can two processes share their memory.

Refuses to complain where there is no GPU: kvbus works from host memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.doctor.finding import Finding, Severity

_WHY = "KV in GPU memory reaches an agent by CUDA IPC; KV in host memory needs none of it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it."""

    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """``num_devices`` counts what the driver has, visible to torch or not.

    ``survey_error`` says why torch saw no GPU; ``ipc_error`` why another process could not open
    memory, empty when it could. ``allocator`` is torch's setting.
    """

    num_devices: int
    driver: str
    torch_version: str
    cuda_version: str
    gpus: tuple[Gpu, ...]
    survey_error: str
    ipc_error: str
    allocator: str


def judge_cuda(facts: CudaFacts) -> Iterator[Finding]:
    """GPUs, IPC, the allocator; one note where there is no GPU."""
    if facts.num_devices == 0:
        yield Finding(
            name="cuda.gpus",
            severity=Severity.NOTE,
            found="CUDA was not checked: there is no NVIDIA GPU here",
            values={"gpus": [], "torch_version": facts.torch_version},
        )
        return
    yield _gpus(facts)
    if facts.gpus:
        yield _ipc(facts)
    yield _allocator(facts)


def _gpus(facts: CudaFacts) -> Finding:
    values = {
        "driver": facts.driver,
        "torch_version": facts.torch_version,
        "cuda_version": facts.cuda_version,
        "gpus": [
            {"uuid": gpu.uuid, "name": gpu.name, "memory_bytes": gpu.memory_bytes}
            for gpu in facts.gpus
        ],
    }
    if facts.gpus:
        shown = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in facts.gpus)
        found = f"{shown}; driver {facts.driver or '?'}, CUDA {facts.cuda_version or '?'} of torch"
        return Finding(name="cuda.gpus", severity=Severity.OK, found=found, values=values)
    return Finding(
        name="cuda.gpus",
        severity=Severity.WARNING,
        found=f"the driver has {facts.num_devices} GPUs, torch {facts.torch_version or '?'} sees "
        f"none: {facts.survey_error}",
        why=_WHY,
        mend="Install a torch that is built for CUDA and fits the driver, and look at "
        "CUDA_VISIBLE_DEVICES.",
        command="python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'",
        values=values,
    )


def _ipc(facts: CudaFacts) -> Finding:
    values = {"error": facts.ipc_error}
    if not facts.ipc_error:
        found = "memory of one process was opened and read by another"
        return Finding(name="cuda.ipc", severity=Severity.OK, found=found, values=values)
    return Finding(
        name="cuda.ipc",
        severity=Severity.WARNING,
        found=f"CUDA IPC between two processes fails: {facts.ipc_error}",
        why=_WHY,
        mend="Run engine and agent where both see the GPU and each other: one IPC and PID "
        "namespace (docker --ipc=host --pid=host), and no expandable segments.",
        values=values,
    )


def _allocator(facts: CudaFacts) -> Finding:
    values = {"setting": facts.allocator}
    if "expandable_segments:true" not in facts.allocator.lower().replace(" ", ""):
        found = facts.allocator or "torch's own settings"
        return Finding(name="cuda.allocator", severity=Severity.OK, found=found, values=values)
    return Finding(
        name="cuda.allocator",
        severity=Severity.WARNING,
        found=f"expandable segments are on ({facts.allocator})",
        why="Memory in expandable segments cannot be exported as plain CUDA IPC handles.",
        mend="Turn them off (expandable_segments:False) for engines with KV in GPU memory.",
        values=values,
    )
