"""``kvbus doctor`` on fake GPUs, good and bad."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbus.doctor import gpus
from kvbus.doctor.gpu_pair import GpuFacts, GpuReport, Shared
from kvbus.memory import cuda
from tests.support.cuda import World, fake_cuda_env, uuid
from tests.tools.doctor.running import Findings, checked, severities

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()", "doctor", "--json"]
KERNELS = [Path(cuda.__file__).with_name("copy_lattice.cu")]
READ, SHARED = "cuda.read.ipc", ("cuda.gpus", "cuda.ipc", "cuda.descriptors")


def look(folder: Path, env: dict[str, str] | None = None, **settings: Any) -> Findings:
    """The findings of the family ``cuda``; those of this machine's own namespaces are left out."""
    wanted = {**os.environ, **(env or {})}
    fake = fake_cuda_env(kernels=KERNELS, world=World(folder / "world"), env=wanted, **settings)
    done = subprocess.run(
        [*KVBUS, "--only", "cuda"], env=fake, capture_output=True, text=True, check=False
    )
    found = checked(json.loads(done.stdout), status=done.returncode)
    return {name: one for name, one in found.items() if name != "cuda.pids"}


def test_gpus_that_work_are_measured(tmp_path: Path) -> None:
    found = look(tmp_path)

    assert severities(found) == dict.fromkeys((*SHARED, READ), "ok")
    assert found["cuda.gpus"]["found"].startswith(f"Fake GPU 0 {uuid(0)}, 80 GiB; Fake GPU 1")
    assert found["cuda.gpus"]["values"]["cuda"] == "13.0"
    assert found[READ]["values"]["wire"] == "cuda_ipc/cuda"
    assert found[READ]["values"]["bytes_per_s"] > 1e6


@pytest.mark.parametrize(
    ("settings", "env", "complaint", "words"),
    [
        ({"faults": "no_handle"}, {}, "cuda.ipc", "cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE"),
        ({"faults": "no_handle"}, {}, "cuda.descriptors", "cuMemExportToShareableHandle"),
        ({"faults": "no_open=201"}, {}, "cuda.ipc", "have the same PID"),
        ({"version": "11080"}, {}, "cuda.kernels", "for CUDA 11.8, refuses the copy kernels"),
        ({"faults": "init"}, {}, "cuda.driver", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ({}, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}, READ, "over tcp/lo, emulated by the CPU"),
        ({}, {"UCX_TLS": "tcp"}, READ, "a READ of GPU memory fails"),
    ],
)
def test_what_fails_is_a_warning_with_its_reason(
    tmp_path: Path, settings: dict[str, str], env: dict[str, str], complaint: str, words: str
) -> None:
    found = look(tmp_path, {"UCX_NET_DEVICES": "lo", **env}, **settings)

    assert found[complaint]["severity"] == "warning"
    assert words in found[complaint]["found"]


def test_mig_and_gpus_apart_are_notes(tmp_path: Path) -> None:
    found = look(tmp_path, mig=1, faults="no_peer")

    assert found["cuda.gpus"]["severity"] == "note"
    assert "MIG" in found["cuda.gpus"]["why"]
    assert found["cuda.peers"]["severity"] == "note"
    assert f"{uuid(0, mig=True)} not {uuid(1, mig=True)}" in found["cuda.peers"]["found"]


def test_a_driver_without_a_gpu_is_one_note(tmp_path: Path) -> None:
    found = look(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})

    assert severities(found) == {"cuda.driver": "note"}


def test_gpus_without_words_and_processes_with_a_namespace_are_named() -> None:
    one = GpuFacts("GPU-1", "old", 1 << 30, has_sequence_words=False)
    shared = Shared(problem="")
    report = GpuReport("12.0", (one,), "", shared, shared)

    found = {one.name: one for one in gpus.sharing_findings(report, in_container=True)}

    assert found["cuda.sequence"].severity == "warning"
    assert "GPU-1" in found["cuda.sequence"].found
    assert found["cuda.pids"].severity == "note"
