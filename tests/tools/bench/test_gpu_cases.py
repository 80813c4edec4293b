"""`kvbus bench --device` on a fake CUDA driver: its bytes count, its times do not."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.cuda import fake_cuda_env

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
TWO_CASES = ("--only", "tp-1-to-2", "--only", "one-block")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*KVBUS, "bench", "--json", "--rounds", "2", "--scale", "0.001", *arguments]
    env = fake_cuda_env()
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def figures(*arguments: str) -> dict[str, dict[str, Any]]:
    ended = bench(*arguments)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert {row["case"] for row in rows} == {"tp-1-to-2", "one-block"}
    return {f"{row['case']}: {row['name'].strip()}": row for row in rows}


@pytest.mark.timeout(300)  # it starts five processes with CUDA
def test_figures_of_one_gpu_stand_beside_bare_copies() -> None:
    found = figures("--device", "cuda:1", *TWO_CASES)

    speeds = {name: row["value"] for name, row in found.items() if row["unit"] == "GB/s"}
    of_case = {name.removeprefix("tp-1-to-2: ") for name in speeds}
    copies = {"pinned copy to host", "pinned copy to GPU"}
    assert of_case == {"mapped", "packed", "device copy"} | copies
    on_gpu, staged = (
        found[f"tp-1-to-2: {name}"]
        for name in ("mapped vs device copy", "packed vs the slower pinned copy")
    )
    ratio = speeds["tp-1-to-2: mapped"] / speeds["tp-1-to-2: device copy"]
    slower = min(speeds[f"tp-1-to-2: {name}"] for name in copies)
    assert on_gpu["value"] == pytest.approx(ratio, rel=1e-3)
    assert staged["value"] == pytest.approx(speeds["tp-1-to-2: packed"] / slower, rel=1e-3)
    assert (on_gpu["target"], staged["target"]) == (">= 0.7", ">= 0.8")
    for name in ("mapped", "packed", "device copy"):
        assert found[f"one-block: {name} p50"]["value"] > 0


@pytest.mark.timeout(300)
def test_two_gpus_have_no_target_of_one() -> None:
    found = figures("--device", "cuda:0", "--device", "cuda:1", *TWO_CASES)

    assert found["tp-1-to-2: mapped vs device copy"]["target"] is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "cpu"], "--device is a GPU"),
        (["--device", "gpu"], "device 'gpu' is neither cpu nor cuda nor cuda:N"),
        (["--device", "cuda:7"], "--device cuda:7: there is no cuda:7: this process sees 2 GPUs"),
        (["--device", "cuda"] * 3, "one GPU for both engines, or one for each"),
        (["--device", "cuda", "--only", "rate"], "no case rate; there are contiguous"),
    ],
)
def test_wrong_devices_are_named_before_anything_starts(arguments: list[str], reason: str) -> None:
    ended = bench(*arguments)

    assert ended.returncode == 2
    assert reason in ended.stderr
    assert "measuring" not in ended.stderr
