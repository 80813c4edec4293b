"""The probes of ``kvbus doctor``: a hang, a crash or an error is reported, and no process is left.

Each probe is a process of its own; a ``sitecustomize`` makes it fail.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import wait_until, write_config
from tests.tools.doctor.running import Findings, checked, doctor, severities

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()", "doctor"]
ENDS_WITHIN_S = 100.0
FAMILIES = ("versions", "memory", "limits", "nixl", "cuda", "agents")
HANG = "import signal; signal.pause()"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def fails(log: str) -> str:
    return f"import os; os.write(2, {log.encode()!r}); os._exit(1)"


def says(answer: object) -> str:
    """A probe that answers whatever it is asked first."""
    line = json.dumps({"id": 1, "reply": answer}).encode() + b"\n"
    return f"import os, signal; os.read(0, 1000); os.write(0, {line!r}); signal.pause()"


class Machine:
    """What each probe does, by the end of its command line; others are what they are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex

    def has(self, **probes: str) -> None:
        text = "import sys\n"
        for role, code in probes.items():
            text += f"if sys.orig_argv[-1:] == [{role!r}]:\n    {code}\n"
        (self.folder / "sitecustomize.py").write_text(text)

    def doctor(self, *arguments: str) -> Findings:
        """The findings of a process of its own, whose stderr shows what it waits for."""
        with self.started("--json", *arguments) as process:
            stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)
        assert all(line.startswith("waiting for ") for line in stderr.splitlines())
        assert self.processes() == []
        return checked(json.loads(stdout), status=process.returncode)

    def started(self, *arguments: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join((str(self.folder), os.environ.get("PYTHONPATH", "")))
        env = {**os.environ, "PYTHONPATH": path, "DOCTOR_TEST_MARK": self.mark}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*KVBUS, *arguments], env=env, **pipes)

    def processes(self) -> list[str]:
        """The command lines of those that were started here, and have not ended."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                if self.mark.encode() in environ.read_bytes():
                    found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
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


@pytest.mark.parametrize(
    ("probe", "timeout", "reason"),
    [
        (fails(UCX_LOG), "20", "no active messages transport"),
        (CRASH, "20", "was ended by SIGSEGV"),
        (HANG, "3", "no answer within"),
        ("sys.modules['nixl'] = None", "20", "nixl"),
    ],
    ids=["ucx", "crash", "hang", "no-nixl"],
)
def test_nixl_that_does_not_work_is_an_error_with_its_reason(
    machine: Machine, probe: str, timeout: str, reason: str
) -> None:
    machine.has(target=probe)

    found = machine.doctor("--only", "nixl", "--timeout", timeout)["nixl.read.configured"]

    assert found["severity"] == "error"
    assert reason in found["found"]


def test_plugins_that_crash_are_a_warning(machine: Machine) -> None:
    machine.has(plugins=CRASH)

    found = machine.doctor("--only", "nixl")

    assert found["nixl.plugins"]["severity"] == "warning"
    assert "was ended by SIGSEGV" in found["nixl.plugins"]["found"]
    assert found["nixl.read.configured"]["severity"] != "error"


@pytest.mark.parametrize("target", [says({}), HANG], ids=["target-stays", "target-late"])
def test_failed_process_of_pair_is_named_and_both_end(machine: Machine, target: str) -> None:
    machine.has(target=target, reader="sys.exit('it is broken')")

    found = machine.doctor("--only", "nixl", "--timeout", "20")

    reads = {name: one for name, one in found.items() if name.startswith("nixl.read.")}
    assert {"nixl.read.configured", "nixl.read.tcp"} <= reads.keys()
    assert [one["found"] for one in reads.values() if "it is broken" not in one["found"]] == []
    assert all(one["values"]["bytes_per_s"] is None for one in reads.values())
    assert found["nixl.read.configured"]["severity"] == "error"


def test_a_package_that_is_too_new_is_an_error_with_its_command(machine: Machine) -> None:
    for name, version in (("nixl", "2.0.0"), ("torch", "2.7.0a0+7c8ec84dab.nv25.03")):
        folder = machine.folder / f"{name}-{version}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(head)

    found = machine.doctor("--only", "versions")

    assert found.keys() == {"versions.nixl", "versions.packages"}
    assert found["versions.nixl"]["severity"] == "error"
    assert found["versions.nixl"]["command"] == "pip install 'nixl<2,>=1.5.1'"
    assert "torch" in found["versions.packages"]["values"]
    assert "pytest" not in found["versions.packages"]["values"]


def test_this_machine_as_a_whole(machine: Machine, tmp_path: Path) -> None:
    """Real NIXL between real processes: about 10 s."""
    config = tmp_path / "agent.toml"
    binds = dict.fromkeys(("peer_bind", "events_bind"), "tcp://127.0.0.1:0")
    write_config(config, {"agent_id": "here", "runtime_dir": str(tmp_path / "run"), **binds})

    found = machine.doctor("--timeout", "60", "--config", str(config))

    read: dict[str, Any] = found["nixl.read.tcp"]["values"]
    staging: dict[str, Any] = found["agents.staging"]["values"]
    assert {one["family"] for one in found.values()} == {*FAMILIES}
    assert not any(name.endswith("unchecked") for name in found)
    assert read["bytes_per_s"] > 1e6
    assert read["wire"].startswith("tcp/")
    assert 0 < staging["wanted_bytes"] < staging["available_bytes"]
    assert found["memory.segment"]["severity"] == "ok"
    assert found["nixl.read.configured"]["values"]["ucx_version"]
    assert found["agents.here.runtime_dir"]["severity"] == "ok"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_what_it_started(machine: Machine, number: signal.Signals) -> None:
    machine.has(target=HANG)
    process = machine.started("--only", "nixl", "--timeout", "3600")
    wait_until(lambda: any("host target" in one for one in machine.processes()), "a probe runs")

    process.send_signal(number)

    stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)
    wait_until(lambda: machine.processes() == [], "all of them end")
    assert (process.returncode, stdout) == (130 if number is signal.SIGINT else -9, "")
    assert "Traceback" not in stderr


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this is about machines without a GPU")
def test_without_a_gpu_there_is_one_note() -> None:
    assert [*severities(doctor("--only", "cuda")).values()] == ["note"]
