"""Has what may hang or crash tried in processes of its own: reads between processes, NIXL, CUDA.

Refuses to import NIXL or torch here: what crashes takes its process along, and no more.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvbus.doctor.check.cuda import CudaFacts
from kvbus.doctor.check.host import ProcessFacts
from kvbus.doctor.check.logs import ucx_transports_in, ucx_version_in, wire_in
from kvbus.doctor.check.nixl import NixlFacts, ReadFacts, UcxChoice
from kvbus.doctor.probe.children import Budget, run_alone, run_pair
from kvbus.doctor.probe.host import has_capability, installed_version, rdma_devices, text_of
from kvbus.doctor.probe.process import GpuList, NixlList

PROCESS = "kvbus.doctor.probe.process"
UCX_TLS = {UcxChoice.SHARED_MEMORY: "sm,tcp", UcxChoice.TCP: "tcp", UcxChoice.RDMA: "ib"}
"""Shared memory alone cannot report a dead peer, and NIXL refuses it: TCP is beside it."""

_TELL = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "UCX_PROTO_INFO": "y",
}
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_CAP_SYS_PTRACE = 19
_ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def process_facts(budget: Budget) -> ProcessFacts:
    """Two processes, and the settings that explain what came of it."""
    scope = text_of(_PTRACE_SCOPE)
    return ProcessFacts(
        error=run_pair(PROCESS, "memory", env={}, budget=budget).failure,
        ptrace_scope=int(scope) if scope else None,
        may_trace=has_capability(_CAP_SYS_PTRACE),
    )


def nixl_facts(budget: Budget) -> NixlFacts:
    """Versions and backends, or why there is none."""
    env = {**_TELL, "UCX_LOG_LEVEL": "info"}
    ended = run_alone(PROCESS, "nixl", "list", env=env, budget=budget)
    listed, error = ended.answer(NixlList, NixlList("", {}))
    return NixlFacts(
        error=error,
        nixl_version=listed.nixl_version,
        ucx_version=ucx_version_in(ended.log),
        backends=listed.backends,
        ucx_transports=ucx_transports_in(ended.log),
    )


def read_facts(budget: Budget, on_progress: Callable[[str], None]) -> Iterator[ReadFacts]:
    """One measurement for each way; RDMA where there is a device."""
    configured = os.environ.get("UCX_TLS", "")
    for way in UcxChoice:
        if way is UcxChoice.RDMA and not rdma_devices():
            continue
        on_progress(f"a NIXL READ, {way.replace('_', ' ')}")
        tls = UCX_TLS.get(way, configured)
        env = {**_TELL, "UCX_TLS": tls} if tls else _TELL
        ended = run_pair(PROCESS, "nixl", env=env, budget=budget)
        rate, error = ended.answer(float, 0.0)
        yield ReadFacts(
            way=way,
            ucx_tls=tls,
            bytes_per_s=rate or None,
            wire=wire_in(ended.log) if rate else "",
            error=error,
        )


def cuda_facts(budget: Budget) -> CudaFacts:
    """The GPUs, and whether two processes can share the memory of the first."""
    num_devices = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    seen, error, ipc_error = GpuList("", ()), "", ""
    if num_devices:
        listed = run_alone(PROCESS, "cuda", "list", env={}, budget=budget)
        seen, error = listed.answer(GpuList, seen)
    if seen.gpus:
        ipc_error = run_pair(PROCESS, "cuda", env={}, budget=budget).failure
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text_of("/proc/driver/nvidia/version"))
    return CudaFacts(
        num_devices=num_devices,
        driver=driver[0] if driver else "",
        torch_version=installed_version("torch") or "",
        cuda_version=seen.cuda_version,
        gpus=seen.gpus,
        survey_error=error,
        ipc_error=ipc_error,
        allocator=next((os.environ[key] for key in _ALLOCATOR_KEYS if key in os.environ), ""),
    )
