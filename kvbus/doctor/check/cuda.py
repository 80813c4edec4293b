"""Says whether torch sees the NVIDIA GPUs, and whether two processes can share their memory.

Refuses to complain where there is no GPU: kvbus works from host memory.
"""

from collections.abc import Iterator

import msgspec

from kvbus.doctor.finding import NOTE, OK, WARNING, Finding, finding, picked

_WHY = "KV in GPU memory reaches an agent by CUDA IPC; KV in host memory needs none of it."


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as torch sees it."""

    uuid: str
    name: str
    memory_bytes: int


class CudaFacts(msgspec.Struct, frozen=True, kw_only=True):
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


def check_cuda(facts: CudaFacts) -> Iterator[Finding]:
    """GPUs, IPC, the allocator; one note where there is no GPU."""
    if facts.num_devices == 0:
        found = "CUDA was not checked: there is no NVIDIA GPU here"
        values = {"gpus": [], "torch_version": facts.torch_version}
        yield finding("cuda.gpus", NOTE, found, values)
        return
    yield _gpus(facts)
    if facts.gpus:
        yield _ipc(facts.ipc_error)
    setting = facts.allocator
    is_expandable = "expandable_segments:true" in setting.lower().replace(" ", "")
    found = f"expandable segments are on ({setting})" if is_expandable else setting
    yield finding(
        "cuda.allocator",
        WARNING if is_expandable else OK,
        found or "torch's own settings",
        {"setting": setting},
        why="Memory in expandable segments cannot be exported as plain CUDA IPC handles.",
        fix="Turn them off (expandable_segments:False) for engines with KV in GPU memory.",
    )


def _gpus(facts: CudaFacts) -> Finding:
    names = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in facts.gpus)
    found = f"{names}; driver {facts.driver or '?'}, CUDA {facts.cuda_version or '?'} of torch"
    if not facts.gpus:
        found = f"the driver has {facts.num_devices} GPUs, torch {facts.torch_version or '?'} sees "
        found += f"none: {facts.survey_error}"
    return finding(
        "cuda.gpus",
        OK if facts.gpus else WARNING,
        found,
        {
            **picked(facts, "driver", "torch_version", "cuda_version"),
            "gpus": [msgspec.structs.asdict(gpu) for gpu in facts.gpus],
        },
        why=_WHY,
        fix="Install a torch that is built for CUDA and fits the driver, and look at "
        "CUDA_VISIBLE_DEVICES.",
        command="python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'",
    )


def _ipc(error: str) -> Finding:
    works = "memory of one process was opened and read by another"
    return finding(
        "cuda.ipc",
        WARNING if error else OK,
        f"CUDA IPC between two processes fails: {error}" if error else works,
        {"error": error},
        why=_WHY,
        fix="Run engine and agent where both see the GPU and each other: one IPC and PID "
        "namespace (docker --ipc=host --pid=host), and no expandable segments.",
    )
