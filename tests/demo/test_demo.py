"""`kvbus demo`: two agents, two engines, real NIXL, and every output as of one engine alone."""

import os
import signal
from pathlib import Path

import pytest

from tests.demo.conftest import Demo

SMALL = ("--requests", "5", "--max-new-tokens", "8")
ENDLESS = ("--requests", "50000", "--max-new-tokens", "4")


@pytest.mark.parametrize(
    "shape",
    [
        (),
        ("--layout", "HND", "--cross-layer", "--prefill-tp", "2", "--decode-tp", "2"),
    ],
    ids=["default", "HND-cross-layer-tp2"],
)
def test_every_output_equals_that_of_the_model_run_alone(demo: Demo, shape: tuple[str]) -> None:
    status, figures, _ = demo.run(*SMALL, *shape)

    assert (status, figures["requests"], figures["matched"]) == (0, 5, 5)
    assert figures["bytes"] > 1_000_000
    assert figures["paths"] == {"direct": 5}
    assert 0 < figures["handoff_ms"]["p50"] <= figures["handoff_ms"]["p99"]
    assert figures["leaked_blocks"] == 0


def test_one_flipped_byte_of_moved_kv_fails_the_run(demo: Demo) -> None:
    status, figures, table = demo.run(*SMALL, "--flip-one-byte")

    assert (status, figures["matched"], figures["failed"]) == (1, 4, 0)
    assert table.count(" NO") == 1
    assert figures["leaked_blocks"] == 0


def test_engines_of_other_tensor_parallelism_are_refused_with_the_field_and_both_values(
    demo: Demo,
) -> None:
    status, figures, table = demo.run(*SMALL, "--prefill-tp", "2", "--decode-tp", "1")

    assert (status, figures["matched"], figures["failed"]) == (1, 0, 5)
    assert "tp_size: prefill has 2, decode has 1" in table
    assert figures["leaked_blocks"] == 0


def test_ctrl_c_ends_every_process_and_leaves_no_files(demo: Demo) -> None:
    run = demo.start(*ENDLESS)
    children = run.wait_mid_run()

    run.signal(signal.SIGINT)
    status, _, stderr = run.end()

    assert len(children) == 4
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert run.left_files() == []
    assert status == 128 + signal.SIGINT
    assert "SIGINT" in stderr
    assert "Traceback" not in stderr


def test_a_killed_agent_is_named_with_its_end_and_its_last_words(demo: Demo) -> None:
    run = demo.start(*ENDLESS)
    children = run.wait_mid_run()

    [agent] = [pid for pid, command in children.items() if "kvbus_prefill" in command]
    os.kill(agent, signal.SIGKILL)
    status, _, stderr = run.end()

    assert status == 1
    assert f"the prefill agent (process {agent}) was ended by SIGKILL" in stderr
    assert '"offer.released"' in stderr
    assert "Traceback" not in stderr
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert run.left_files() == []
