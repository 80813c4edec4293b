"""`kvbus demo`: two agents, two engines, real NIXL, and every output as of one engine alone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.agents import wait_until

pytestmark = pytest.mark.timeout(300)  # four processes start, which takes long on a busy machine

COMMAND = [sys.executable, "-c", "from kvbus.cli import app; app()", "demo"]
ENDS_WITHIN_S, MID_RUN_WITHIN_S = 100.0, 90.0
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
"""The environment of a process without a locale."""
SMALL = ("--requests", "5", "--max-new-tokens", "8")
PACKED = {"packed"}
ANY = {"mapped", "direct", *PACKED}
CI_SHAPE = ("tp=3", "tp=2 pp=3 block=5", "window=50 path=packed prefill-chunk=32", PACKED)
HOST_SHAPE = ("tp=2 ring=0.5", "tp=3,ring=0.5,layout=HND", "kv-heads=0 prefill-chunk=32")
"""A run takes 10 s of CPU time: these mix what is in the others, too."""
SHAPES = [
    ("layout=HND block=64", "tp=2", "path=direct", {"direct"}),
    ("tp=2", "layout=HND", "path=mapped", {"mapped"}),
    ("tp=8 pp=4", "layout=HND", "kv-heads=2 path=packed prefill-chunk=50", PACKED),
    (*HOST_SHAPE, ANY),
    ("tp=4 pp=2", "tp=6 cross_layer=true", "kv-heads=6 path=packed", PACKED),
    ("tp=2", "tp=3 block=48", "kv-heads=0 window=40", ANY),
    ("ring=0.1", "ring=0.1", "concurrency=10 requests=20", ANY),
]


def sides(prefill: str, decode: str, both: str) -> list[str]:
    options = [f"--{option}" for option in both.split()]
    return ["--prefill", prefill, "--decode", decode, *options]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "COLUMNS": "80", **ASCII}


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    ended = subprocess.run(
        [*COMMAND, "--json", *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    *above, last = ended.stdout.splitlines() or [ended.stderr]
    return ended.returncode, json.loads(last), "\n".join(above)


@contextmanager
def mid_run(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", dict[int, str]]]:
    """A run without end in which requests have ended; the commands of its children by pid."""

    def num_completed() -> int:
        logs = folder.glob("*/decode-agent.log")
        return sum(log.read_text().count("handoff.completed") for log in logs)

    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*COMMAND, "--json", "--requests", "50000", "--max-new-tokens", "4"]
    with subprocess.Popen(command, env=environment(folder), **pipes) as process:
        try:
            wait_until(lambda: num_completed() > 8, "handoffs", MID_RUN_WITHIN_S)
            children = psutil.Process(process.pid).children()
            yield process, {one.pid: " ".join(one.cmdline()) for one in children}
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "paths"),
    [CI_SHAPE, *(pytest.param(*shape, marks=pytest.mark.long) for shape in SHAPES)],
)
def test_engines_of_other_shapes_match_output_of_model_alone(
    folder: Path, prefill: str, decode: str, both: str, paths: set[str]
) -> None:
    status, figures, output = run(folder, *SMALL, *sides(prefill, decode, both))

    assert (status, figures["leaked_blocks"]) == (0, 0), output
    assert figures["matched"] == figures["requests"] == sum(figures["paths"].values()) >= 5
    assert set(figures["paths"]) <= paths
    assert figures["bytes"] > 100_000
    assert 0 < figures["handoff_ms"]["p50"] <= figures["handoff_ms"]["max"]
    assert figures["handoff_ms"]["p99"] is None, "of fewer than 100 handoffs"
    if both == CI_SHAPE[2]:
        assert "prefill layout=NHD tp=3 pp=1 block=16 -> decode layout=NHD tp=2 pp=3 bl" in output


def test_flipped_byte_of_moved_kv_fails_run_and_no_other_output(folder: Path) -> None:
    status, figures, table = run(folder, *SMALL, "--flip-one-byte", *sides(*HOST_SHAPE))

    assert (status, figures["matched"], figures["failed"]) == (1, 4, 0)
    assert table.count(" differs") == 1
    assert figures["leaked_blocks"] == 0


@pytest.mark.parametrize("ends", ["ctrl-c", pytest.param("killed", marks=pytest.mark.long)])
def test_ctrl_c_or_killed_agent_ends_all_and_leaves_no_files(folder: Path, ends: str) -> None:
    with mid_run(folder) as (process, children):
        (agent,) = [pid for pid, command in children.items() if "kvbus_prefill" in command]
        if ends == "killed":
            os.kill(agent, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)

    figures = json.loads(stdout.splitlines()[-1])
    ends_of = ("matched", "uncompared", "failed", "unfinished")
    assert sum(figures[name] for name in ends_of) == figures["requests"]
    assert (len(children), list(folder.iterdir())) == (4, [])
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert "Traceback" not in stderr
    if ends == "killed":
        assert process.returncode == 1
        assert figures["matched"] >= 1
        assert f"the prefill agent (process {agent}) was ended by SIGKILL" in stderr
        assert '"offer.released"' in stderr
    else:
        assert process.returncode == 128 + signal.SIGINT
        assert " did not finish" in stdout
        assert (" outputs equal" in stdout) == bool(figures["matched"])
        assert "SIGINT" in stderr
