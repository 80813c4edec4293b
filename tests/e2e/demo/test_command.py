"""What the demo reports, and its help."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.demo.options import DemoOptions, Step
from kvbus.demo.report import DemoReport, Served
from kvbus.errors import ConfigError
from tests.support.cuda import fake_cuda_env


def test_uncompared_outputs_are_told_from_differing_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, wrong = Step(1, "a"), Step(2, "b")
    served = [
        Served("r1", "compared", first=right, steps=[right]),
        Served("r2", "compared", first=right, steps=[wrong]),
        Served("r3", "not yet", first=right, steps=[right]),
    ]
    report = DemoReport(DemoOptions(requests=9), served, alone={"compared": [right, right]})

    report.print()

    told, found = capsys.readouterr().out, report.summary()
    assert (found["matched"], found["uncompared"], found["unfinished"]) == (1, 1, 6)
    assert "1 outputs equal" in told
    assert "the output of request r2 differs" in told
    assert "1 finished and were not compared\n6 did not finish" in told

    DemoReport(DemoOptions(requests=9), served).print()

    told = capsys.readouterr().out
    assert "3 finished and were not compared" in told
    assert "equal" not in told, "none was compared before the run was interrupted"


@pytest.mark.parametrize(
    ("leaks", "trouble", "is_ok"),
    [
        ({"prefill": 0, "decode": 0}, [], True),
        ({"prefill": 0, "decode": 1}, [], False),
        (None, [], False),
        ({"prefill": 0, "decode": 0}, ["the decode agent was ended"], False),
    ],
)
def test_leaked_or_uncounted_blocks_or_trouble_fail_the_run(
    leaks: dict[str, int] | None, trouble: list[str], is_ok: bool
) -> None:
    report = DemoReport(DemoOptions(requests=0), leaks=leaks, trouble=trouble)

    assert report.ok == is_ok
    assert report.summary()["leaked_blocks"] == (leaks and sum(leaks.values()))


def test_help_has_80_columns_and_commands_start_without_torch() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "80"})
    code = "import kvbus.demo.run, sys; sys.exit('torch' in sys.modules)"

    assert "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert CliRunner().invoke(app, ["--version"]).output.startswith("kvbus 0.")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("option", "device", "reason"),
    [
        ("--prefill", "gpu", "--prefill: device 'gpu' is neither cpu nor cuda nor cuda:N"),
        ("--decode", "cuda:2", "--decode device=cuda:2: there is no cuda:2: this process sees 2"),
        ("--decode", "cuda:1", f"--decode device=cuda:1: torch {torch.__version__} is built with"),
    ],
    ids=["no device", "no such GPU", "torch without CUDA"],
)
def test_a_device_that_cannot_be_used_is_named_at_the_start(
    option: str, device: str, reason: str
) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA here")
    command = [sys.executable, "-c", "from kvbus.cli import app; app()", "demo"]
    ended = subprocess.run(
        [*command, option, f"device={device}"],
        env=fake_cuda_env(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {reason}")


def test_a_machine_without_a_driver_is_named_at_the_start() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    result = CliRunner().invoke(app, ["demo", "--prefill", "device=cuda"])

    assert result.exit_code == 2
    assert "device=cuda: this process finds no NVIDIA driver" in result.stderr


@pytest.mark.parametrize(
    ("text", "device", "shown"),
    [
        ("", "cpu", "layout=NHD tp=1 pp=1 block=16"),
        ("device=cpu", "cpu", "layout=NHD tp=1 pp=1 block=16"),
        ("tp=2 device=cuda", "cuda", "layout=NHD tp=2 pp=1 block=16 device=cuda"),
        ("device=cuda:11", "cuda:11", "layout=NHD tp=1 pp=1 block=16 device=cuda:11"),
    ],
)
def test_device_of_an_engine_is_the_cpu_unless_given(text: str, device: str, shown: str) -> None:
    side = DemoOptions(prefill=text).sides["prefill"]

    assert side.device == device
    assert str(side) == shown


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "CUDA"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="--decode: "):
        DemoOptions(decode=f"device={device}")
