"""The tests of GPUs on the fake CUDA driver, each module in a process of its own.

Drivers' calls, NIXL, UCX and agents are real. The driver is not: it shows that kvbus calls CUDA as
its documentation says, and nothing of a card.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.gpu.fake import KERNELS, MARK
from tests.support.cuda import World, fake_cuda_env

FOLDER = Path(__file__).with_name("gpu")
NUM_PASSED = {"copying": 3, "ends": 6, "handoffs": 26, "ordering": 9, "parking": 25}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NUM_PASSED)
def test_gpu_tests_pass_on_the_fake_driver(name: str, tmp_path: Path) -> None:
    assert {f"test_{one}.py" for one in NUM_PASSED} == {one.name for one in FOLDER.glob("test_*")}
    env = fake_cuda_env(
        kernels=[KERNELS], world=World(tmp_path / "world"), env={**os.environ, MARK: "1"}
    )
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout", "120"]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER / f"test_{name}.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    passed = re.search(r"(\d+) passed", done.stdout)
    assert not done.returncode, done.stdout[-8000:] + done.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) >= NUM_PASSED[name], done.stdout
