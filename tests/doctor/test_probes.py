"""The probes of ``kvbus doctor``: one that hangs, crashes or refuses is told, and none is left.

Each probe is a process of its own; a ``sitecustomize`` has it go wrong, or tell of another machine.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.agents import wait_until, write_config
from tests.doctor.running import Findings, checked, doctor, severities

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()", "doctor"]
ENDS_WITHIN_S = 100.0
FAMILIES = ("versions", "memory", "limits", "nixl", "cuda", "agents")
LISTED = '{"nixl_version": "1.5.1", "backends": %s}'
WITH_UCX, WITHOUT_UCX = '{"UCX": ["DRAM_SEG"], "GDS": []}', '{"UCX": [], "POSIX": ["DRAM_SEG"]}'
HANG = "import signal; signal.pause()"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def ends(status: int, output: str = "", log: str = "") -> str:
    """A probe that says this and ends, whatever the machine."""
    said = f"os.write(1, {output.encode()!r}); os.write(2, {log.encode()!r})"
    return f"import os; {said}; os._exit({status})"


class Machine:
    """What each probe does, by the end of its command line; others are what they are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex

    def has(self, **probes: str) -> None:
        text = "import sys\n"
        for role, code in probes.items():
            text += f"if sys.orig_argv[-1:] == [{role!r}]:\n    {code}\n"
        (self.folder / "sitecustomize.py").write_text(text)

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.folder), os.environ.get("PYTHONPATH", "")))
        return {"PYTHONPATH": path, "DOCTOR_TEST_MARK": self.mark}

    def doctor(self, *arguments: str) -> Findings:
        """What is found here by a process of its own, which else says what it waits for."""
        with self.started("--json", *arguments) as process:
            stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)
        assert all(line.startswith("waiting for ") for line in stderr.splitlines())
        assert self.processes() == []
        return checked(json.loads(stdout), status=process.returncode)

    def started(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*KVBUS, *arguments],
            env={**os.environ, **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[str]:
        """The command lines of those that were started here, and have not ended."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in environ.read_bytes():
                    found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it has ended, or is not ours
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


UCX_LOG = (
    "[1795253608.4] [vm:342  :0]       select.c:722  UCX  ERROR   no active messages transport\n"
    "E1121 09:33:36.109193     402 ucx_utils.cpp:635] endpoint create failed\n"
    "[1795253608.5] [vm:342  :0]       other.c:1  UCX  ERROR   something later\n"
    "kvbus.errors.TransferFailed: no NIXL agent\n"
)
NIXL_LOG = "E1121 09:33:38.109011     408 nixl_agent.cpp:342] backend creation failed\nlast line\n"


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        (ends(1, log=UCX_LOG), "no active messages transport"),
        (ends(1, log=NIXL_LOG), "backend creation failed"),
        (CRASH, "killed by SIGSEGV"),
        (HANG, "no answer within"),
        (ends(0, LISTED % WITHOUT_UCX), "it has no backend UCX"),
    ],
    ids=["ucx", "nixl", "crash", "hang", "without-ucx"],
)
def test_nixl_that_does_not_work_is_an_error_with_its_reason(
    machine: Machine, probe: str, told: str
) -> None:
    machine.has(list=probe, target="sys.exit('no memory')")

    found = machine.doctor("--only", "nixl", "--timeout", "8")

    assert found["nixl.installed"]["severity"] == "error"
    assert told in found["nixl.installed"]["found"]


@pytest.mark.parametrize(
    ("target", "reader", "told"),
    [
        (
            "sys.exit('the target has no memory')",
            "sys.stdin.readline(); import os; os._exit(1)",
            "no memory",
        ),
        (f"print('a line', flush=True); {HANG}", "sys.exit('it is broken')", "it is broken"),
        (
            "sys.stdin.read(); print('a line', flush=True); import os; os._exit(0)",
            "sys.exit('it is broken')",
            "it is broken",
        ),
    ],
    ids=["target-first", "target-stays", "target-late"],
)
def test_of_a_pair_of_processes_the_one_that_failed_is_told_and_both_end(
    machine: Machine, target: str, reader: str, told: str
) -> None:
    machine.has(list=ends(0, LISTED % WITH_UCX), target=target, reader=reader)

    found = machine.doctor("--only", "nixl", "--timeout", "8")

    reads = {name: one for name, one in found.items() if name.startswith("nixl.read.")}
    assert {"nixl.read.configured", "nixl.read.tcp"} <= reads.keys()
    assert [one["found"] for one in reads.values() if told not in one["found"]] == []
    assert all(one["values"]["bytes_per_s"] is None for one in reads.values())
    assert found["nixl.read.configured"]["severity"] == "error"


def test_a_package_that_is_too_new_is_an_error_with_its_command(machine: Machine) -> None:
    for name, version in (("nixl", "2.0.0"), ("torch", "2.7.0a0+7c8ec84dab.nv25.03")):
        folder = machine.folder / f"{name}-{version}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(head)

    found = machine.doctor("--only", "versions")

    assert found.keys() == {"versions.python", "versions.nixl", "versions.packages"}
    assert found["versions.nixl"]["severity"] == "error"
    assert found["versions.nixl"]["command"] == "pip install 'nixl<2,>=1.5.1'"
    assert "torch" in found["versions.packages"]["values"]
    assert "pytest" not in found["versions.packages"]["values"]


def test_this_machine_as_a_whole(machine: Machine, tmp_path: Path) -> None:
    """Real NIXL between real processes, in some ten seconds."""
    config = tmp_path / "agent.toml"
    binds = dict.fromkeys(("peer_bind", "events_bind"), "tcp://127.0.0.1:0")
    write_config(config, {"agent_id": "here", "runtime_dir": str(tmp_path / "run"), **binds})

    found = machine.doctor("--timeout", "60", "--config", str(config))

    read: dict[str, Any] = found["nixl.read.tcp"]["values"]
    room: dict[str, Any] = found["memory.room"]["values"]
    assert {one["family"] for one in found.values()} == {*FAMILIES}
    assert not any(name.endswith("unchecked") for name in found)
    assert read["bytes_per_s"] > 1e6
    assert read["wire"].startswith("tcp/")
    assert 0 < room["available_bytes"] <= room["total_bytes"]
    assert found["memory.segment"]["severity"] == "ok"
    assert found["nixl.read.configured"]["values"]["ucx_version"]
    assert "DRAM_SEG" in found["nixl.installed"]["values"]["backends"]["UCX"]
    assert found["agents.here.runtime_dir"]["severity"] == "ok"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_what_it_started(machine: Machine, number: signal.Signals) -> None:
    machine.has(list=HANG)
    process = machine.started("--only", "nixl", "--timeout", "3600")
    wait_until(lambda: any("nixl list" in one for one in machine.processes()), "a probe runs")

    process.send_signal(number)

    stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)
    wait_until(lambda: machine.processes() == [], "all of them end")
    assert (process.returncode, stdout) == (130 if number is signal.SIGINT else -9, "")
    assert "Traceback" not in stderr


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this is about machines without a GPU")
def test_without_a_gpu_there_is_one_note() -> None:
    assert [*severities(doctor("--only", "cuda")).values()] == ["note"]
