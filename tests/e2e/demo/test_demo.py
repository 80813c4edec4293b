"""`kvbus demo`: two agents, two engines, real NIXL, and every output as of one engine alone."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.demo.conftest import Demo

pytestmark = pytest.mark.timeout(300)  # four processes start, which takes long on a busy machine


SMALL = ("--requests", "5", "--max-new-tokens", "8")
PACKED = {"packed"}
ANY = {"mapped", "direct", *PACKED}
CI_SHAPE = ("tp=3", "tp=2 pp=3 block=5", "window=50 path=packed prefill-chunk=32", PACKED)
HOST_SHAPE = ("tp=2 ring=0.5", "tp=3,ring=0.5,layout=HND", "kv-heads=0 prefill-chunk=32")
"""A run takes ten seconds of CPU time: these mix what is in the others, too."""
SHAPES = [
    ("layout=HND block=64", "tp=2", "path=direct", {"direct"}),
    ("tp=2", "layout=HND", "path=mapped", {"mapped"}),
    ("tp=8 pp=4", "layout=HND", "kv-heads=2 path=packed prefill-chunk=50", PACKED),
    (*HOST_SHAPE, ANY),
    ("tp=4 pp=2", "tp=6 cross_layer=true", "kv-heads=6 path=packed", PACKED),
    ("tp=2", "tp=3 block=48", "kv-heads=0 window=40", ANY),
    ("ring=0.1", "ring=0.1", "concurrency=10 requests=20", ANY),
]
ENDLESS = ("--requests", "50000", "--max-new-tokens", "4")


def sides(prefill: str, decode: str, both: str) -> list[str]:
    """``path=packed`` of ``both`` as an option."""
    options = [f"--{option}" for option in both.split()]
    return ["--prefill", prefill, "--decode", decode, *options]


def test_outputs_equal_model_run_alone_and_are_told_with_setup(
    demo: Demo,
) -> None:
    status, figures, said = demo.run(*SMALL, "--decode", "tp=2")

    assert (status, figures["requests"], figures["matched"]) == (0, 5, 5)
    assert figures["bytes"] > 1_000_000
    assert sum(figures["paths"].values()) == 5
    assert 0 < figures["handoff_ms"]["p50"] <= figures["handoff_ms"]["max"]
    assert figures["handoff_ms"]["p99"] is None, "of fewer than 100 handoffs"
    assert figures["leaked_blocks"] == 0
    words = "layout=NHD {} pp=1 block=16"
    assert f"prefill {words.format('tp=1')} -> decode {words.format('tp=2')}\n" in said


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "paths"),
    [CI_SHAPE, *(pytest.param(*shape, marks=pytest.mark.long) for shape in SHAPES)],
)
def test_engines_of_other_shapes_match_output_of_model_alone(
    demo: Demo, prefill: str, decode: str, both: str, paths: set[str]
) -> None:
    status, figures, table = demo.run(*SMALL, *sides(prefill, decode, both))

    assert (status, figures["leaked_blocks"]) == (0, 0), table
    assert figures["matched"] == figures["requests"] >= 5
    assert set(figures["paths"]) <= paths


def test_flipped_byte_of_moved_kv_fails_run_and_no_other_output(demo: Demo) -> None:
    status, figures, table = demo.run(*SMALL, "--flip-one-byte", *sides(*HOST_SHAPE))

    assert (status, figures["matched"], figures["failed"]) == (1, 4, 0)
    assert table.count(" differs") == 1
    assert figures["leaked_blocks"] == 0


def test_ctrl_c_ends_every_process_and_leaves_no_files(demo: Demo) -> None:
    run = demo.start(*ENDLESS)
    children = run.wait_mid_run()

    run.process.send_signal(signal.SIGINT)
    status, stdout, stderr = run.end()

    assert len(children) == 4
    assert " did not finish" in stdout
    assert " outputs equal" in stdout
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert run.left_files() == []
    assert status == 128 + signal.SIGINT
    assert "SIGINT" in stderr
    assert "Traceback" not in stderr


@pytest.mark.long
def test_a_killed_agent_is_named_with_its_end_and_its_last_words(demo: Demo) -> None:
    run = demo.start(*ENDLESS, "--json")
    children = run.wait_mid_run()

    [agent] = [pid for pid, command in children.items() if "kvbus_prefill" in command]
    os.kill(agent, signal.SIGKILL)
    status, stdout, stderr = run.end()

    assert status == 1
    figures = json.loads(stdout.splitlines()[-1])
    assert figures["matched"] >= 1
    assert figures["matched"] + figures["failed"] + figures["unfinished"] == figures["requests"]
    assert f"the prefill agent (process {agent}) was ended by SIGKILL" in stderr
    assert '"offer.released"' in stderr
    assert "Traceback" not in stderr
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert run.left_files() == []
