"""The probes of ``kvbus doctor``: one that hangs, crashes or refuses is told, and none is left.

Each probe is a process of its own, ``python -m ... KIND ROLE``; a ``sitecustomize`` has it go
wrong, or tell of a machine that is not this one.
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
from typer.testing import CliRunner

from kvbus.cli import app
from tests.agents import wait_until
from tests.doctor.running import Findings, checked

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()", "doctor"]
ENDS_WITHIN_S = 100.0
FAMILIES = ("versions", "memory", "limits", "processes", "nixl", "cuda", "agents")
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
        """What is found here by a process of its own, which says nothing else."""
        command = [*KVBUS, "--json", *arguments]
        ended = subprocess.run(
            command,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
            check=False,
        )
        assert ended.stderr == ""
        assert self.processes() == []
        return checked(json.loads(ended.stdout), status=ended.returncode)

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
PYTHON_LOG = "Traceback\n  File\nModuleNotFoundError: No module named 'nixl'\n\n"


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        (ends(1, log=UCX_LOG), "no active messages transport"),
        (ends(1, log=NIXL_LOG), "backend creation failed"),
        (ends(1, log=PYTHON_LOG), "No module named 'nixl'"),
        (CRASH, "killed by SIGSEGV"),
        (HANG, "no answer within"),
        (ends(0, "[]"), "it answered something else"),
        (ends(0, LISTED % WITHOUT_UCX), "it has no backend UCX"),
    ],
    ids=["ucx", "nixl", "python", "crash", "hang", "nonsense", "without-ucx"],
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
        ("sys.exit('the target has no memory')", "sys.exit(sys.stdin.readline())", "no memory"),
        (f"print('a line', flush=True); {HANG}", "sys.exit('it is broken')", "it is broken"),
        ("sys.stdin.read(); sys.exit('the reader went')", HANG, "no answer within"),
    ],
    ids=["target-first", "target-stays", "reader-hangs"],
)
def test_of_a_pair_of_processes_the_one_that_failed_is_told_and_both_end(
    machine: Machine, target: str, reader: str, told: str
) -> None:
    machine.has(list=ends(0, LISTED % WITH_UCX), target=target, reader=reader)

    found = machine.doctor("--only", "nixl", "--timeout", "8")

    reads = {name: one for name, one in found.items() if name.startswith("nixl.read.")}
    assert {"nixl.read.configured", "nixl.read.shared_memory", "nixl.read.tcp"} <= reads.keys()
    assert all(told in one["found"] for one in reads.values())
    assert all(one["values"]["bytes_per_s"] is None for one in reads.values())
    assert found["nixl.read.configured"]["severity"] == "error"


def test_what_ucx_and_nixl_say_of_a_machine_is_told(machine: Machine) -> None:
    info = (
        "[1795253608.4] [vm:342  :0] ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded)\n"
        "[1795253608.4] [vm:342  :0] ucp_context.c:1508 UCX  WARN  transport 'rc' is not "
        "available, please use one or more of: cma, mm, tcp\n"
    )
    machine.has(
        list=ends(0, LISTED % WITH_UCX, info),
        target="sys.stdin.read(); sys.exit()",
        reader=ends(0, "9e9"),
    )

    found = machine.doctor("--only", "nixl")

    values = found["nixl.backends"]["values"]
    assert found["nixl.installed"]["found"] == "NIXL 1.5.1, UCX 1.23.0"
    assert values["ucx_transports"] == ["cma", "mm", "tcp"]
    assert values["backends"] == {"UCX": ["DRAM_SEG"], "GDS": []}
    assert "9 GB/s" in found["nixl.one_machine"]["found"]


def test_a_package_that_is_too_new_is_an_error_with_its_command(machine: Machine) -> None:
    for name, version in (("nixl", "2.0.0"), ("torch", "2.7.0a0+7c8ec84dab.nv25.03")):
        folder = machine.folder / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )

    found = machine.doctor("--only", "versions")

    assert found.keys() == {"versions.python", "versions.nixl", "versions.packages"}
    assert found["versions.nixl"]["severity"] == "error"
    assert found["versions.nixl"]["command"] == "pip install 'nixl<2,>=1.5.1'"
    assert "torch" in found["versions.packages"]["values"]
    assert "pytest" not in found["versions.packages"]["values"]


def test_limits_and_processes_are_those_of_the_command(machine: Machine) -> None:
    options = f"{KVBUS[-1]} --json --only limits --only processes"
    shell = f"ulimit -n 200; ulimit -l 8; exec {sys.executable} -c '{KVBUS[2]}' {options}"

    ended = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)

    found = checked(json.loads(ended.stdout), status=ended.returncode)
    reading = found["processes.read_memory"]
    may = reading["values"]["may_trace"] or (reading["values"]["ptrace_scope"] or 0) <= 1
    assert found["limits.open_files"]["values"] == {"open_files": 200}
    assert found["limits.locked_memory"]["values"]["locked_bytes"] == 8192
    assert (reading["severity"] == "ok") == may


def test_this_machine_as_a_whole(machine: Machine, tmp_path: Path) -> None:
    """Real NIXL between real processes, in some ten seconds."""
    config = tmp_path / "agent.toml"
    config.write_text(
        'agent_id = "here"\npeer_bind = "tcp://127.0.0.1:0"\nevents_bind = "tcp://127.0.0.1:0"\n'
        f'runtime_dir = "{tmp_path / "run"}"\n'
    )

    found = machine.doctor("--timeout", "60", "--config", str(config))

    read: dict[str, Any] = found["nixl.read.tcp"]["values"]
    room: dict[str, Any] = found["memory.room"]["values"]
    assert {one["family"] for one in found.values()} == {*FAMILIES}
    assert not any(name.endswith("unchecked") for name in found)
    assert read["bytes_per_s"] > 1e6
    assert read["wire"].startswith("tcp/")
    assert 0 < room["available_bytes"] <= room["total_bytes"]
    assert found["memory.segment"]["severity"] == "ok"
    assert "DRAM_SEG" in found["nixl.backends"]["values"]["backends"]["UCX"]
    assert found["agents.here.runtime_dir"]["severity"] == "ok"


@pytest.mark.long
def test_a_choice_of_transports_that_does_not_work_has_a_reason_and_the_others_go_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "sm,self")

    found = machine.doctor("--only", "nixl")

    configured = found["nixl.read.configured"]
    assert (configured["severity"], configured["values"]["bytes_per_s"]) == ("error", None)
    assert "no peer failure handler" in configured["found"]
    for name in ("nixl.read.shared_memory", "nixl.read.tcp"):
        assert found[name]["values"]["bytes_per_s"] > 1e6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_what_it_started(machine: Machine, number: signal.Signals) -> None:
    machine.has(list=HANG)
    process = subprocess.Popen(
        [*KVBUS, "--only", "nixl", "--timeout", "3600"],
        env={**os.environ, **machine.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any("nixl list" in one for one in machine.processes()), "a probe runs")

    process.send_signal(number)

    stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)
    wait_until(lambda: machine.processes() == [], "all of them end")
    assert (process.returncode, stdout) == (130 if number is signal.SIGINT else -9, "")
    assert "Traceback" not in stderr


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this is about machines without a GPU")
def test_without_a_gpu_there_is_one_note() -> None:
    result = CliRunner().invoke(app, ["doctor", "--only", "cuda", "--json"])

    found = checked(json.loads(result.stdout), status=result.exit_code)
    assert [one["severity"] for one in found.values()] == ["note"]
