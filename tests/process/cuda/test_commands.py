"""`kvbus demo` and `kvbus bench` on a card; the demo needs torch for CUDA, too."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
SIDES = {
    "one GPU": ("device=cuda", "device=cuda layout=HND block=32"),
    "from a CPU": ("", "device=cuda"),
    "to a CPU": ("device=cuda tp=2", "block=48"),
    "through a ring": ("device=cuda ring=0.5", "device=cuda ring=0.5"),
    "two GPUs": ("device=cuda:0", "device=cuda:1"),
}


@pytest.fixture(autouse=True)
def _card() -> None:
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has no GPU")


def kvbus(*arguments: str) -> dict[str, Any]:
    ended = subprocess.run([*KVBUS, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("name", SIDES)
def test_outputs_equal_those_of_the_model_alone(name: str, chunk: int | None) -> None:
    if torch.cuda.device_count() < (2 if name == "two GPUs" else 1):
        pytest.skip(f"torch {torch.__version__} sees too few GPUs")
    prefill, decode = SIDES[name]
    options = [] if chunk is None else ["--prefill-chunk", str(chunk)]

    found = kvbus("demo", "--json", f"--prefill={prefill}", f"--decode={decode}", *options)

    assert found["matched"] == found["requests"] == 12
    assert found["leaked_blocks"] == 0
    assert name != "one GPU" or found["paths"] == {"mapped": 12}


def test_every_case_of_the_benchmark_maps_memory() -> None:
    found = kvbus("bench", "--device", "cuda", "--json", "--rounds", "3", "--scale", "0.02")

    mapped = {row["case"] for row in found["figures"] if row["name"] == "mapped p50"}
    assert mapped == {row["case"] for row in found["figures"]}
    assert found["machine"]["gpus"][0]
