"""`kvbus bench-prefill | kvbus bench-decode` at two agents: figures, or one line with a reason."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from kvbus.cli import app
from tests.support.agents import AgentProcess, Agents, agents_ended, wait_until

SED = shutil.which("sed") or "sed"
KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
ENDS_WITHIN_S = 100.0
MANY = ("--mib", "1", "--rounds", "1000")
CASES = {"one-block", "hnd-to-nhd", "runs-16k", "runs-256k", "in-order"}
OK = "ok: {} handoffs; all bytes of the first of each case are equal"
KIB, MIB = 1 << 10, 1 << 20
Case = dict[str, float]


class Trio(Agents):
    """A prefill agent, and two decode agents: one that maps memory, one as of another machine."""

    @property
    def roles(self) -> tuple[AgentProcess, AgentProcess, AgentProcess]:
        prefill, near, far = self.all
        return prefill, near, far


@pytest.fixture(scope="module")
def shared_trio() -> Iterator[Trio]:
    with agents_ended(Trio) as made:
        prefill, near = made.prepare("prefill"), made.prepare("decode", mapped=True)
        made.start(prefill, near, made.prepare("decode"))
        yield made


@pytest.fixture
def trio(shared_trio: Trio) -> Iterator[Trio]:
    """The agents, which hold nothing after a test."""
    yield shared_trio
    shared_trio.check()
    assert not any(agent.status()["engines"] for agent in shared_trio.all)


class Side:
    """One command; ends with its ``with`` block."""

    def __init__(
        self, name: str, agent: Path, *options: str, stdin: int | IO[str] = subprocess.DEVNULL
    ) -> None:
        self.process = subprocess.Popen(
            [*KVBUS, f"bench-{name}", "--attach", str(agent), *options],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def output(self) -> IO[str]:
        """Its output, which only another process reads from now on."""
        output, self.process.stdout = self.process.stdout, None
        assert output is not None
        return output

    def ended(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=ENDS_WITHIN_S)
        return self.process.returncode, output or "", errors


@contextlib.contextmanager
def both(
    prefill: AgentProcess, decode: AgentProcess, *options: str, between: str = ""
) -> Iterator[tuple[Side, Side]]:
    """Both sides, joined by a pipe, which sed may edit."""
    with contextlib.ExitStack() as stack:
        offering = stack.enter_context(Side("prefill", prefill.attach, *options))
        lines = stack.enter_context(offering.output())
        if between:
            edit = [SED, "-u", between]
            editing = subprocess.Popen(edit, stdin=lines, stdout=subprocess.PIPE, text=True)
            stack.enter_context(editing)
            stack.callback(editing.kill)
            lines.close()
            assert editing.stdout is not None
            lines = editing.stdout
        fetching = stack.enter_context(Side("decode", decode.attach, "--json", stdin=lines))
        lines.close()  # the other side has it
        yield offering, fetching


def figures(output: str) -> dict[str, Case]:
    """Those of each case in the JSON object at the end, by name; its lines show the same."""
    *shown, last = output.splitlines()
    if shown and shown[-1].startswith("ok: "):
        assert json.loads(last)["failed"] is None
        shown.pop()
    rows: list[dict[str, Any]] = json.loads(last)["figures"]
    assert [case for case in CASES if any(line.startswith(f"{case}: ") for line in shown)] == [
        case for case in CASES if any(row["case"] == case for row in rows)
    ]
    assert max(map(len, shown)) <= 80
    found: dict[str, Case] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["name"].strip()] = row["value"]
    return found


def num_bytes(case: Case, path: str) -> float:
    stages = [value for name, value in case.items() if name.startswith(f"{path}: ")]
    assert case[f"{path} p50"] > 0
    assert max(stages) > 0
    return case[path] * case[f"{path} p50"] * 1e6


def test_near_agents_map_and_far_ones_use_the_path_that_fits(trio: Trio) -> None:
    prefill, near, far = trio.roles
    with both(prefill, near, "--mib", "1", "--rounds", "2") as (offering, fetching):
        (status, output, errors), offered = fetching.ended(), offering.ended()
    with both(prefill, far, "--mib", "8", "--rounds", "1") as (_, fetching):
        other_status, other_output, _ = fetching.ended()

    assert (status, other_status) == (0, 0), errors
    assert offered[:2] == (0, "")
    assert output.splitlines()[-2] == OK.format(28 + len(CASES))
    found, of_far = figures(output), figures(other_output)
    assert found.keys() == of_far.keys() == CASES
    assert [case["mapped handoffs"] for case in found.values()] == [20, 2, 2, 2, 2]
    for name, case in found.items():
        size = 64 * KIB if name == "one-block" else MIB
        assert num_bytes(case, "mapped") == pytest.approx(size, rel=1e-3)
    assert num_bytes(of_far["one-block"], "direct") == pytest.approx(64 * KIB, rel=1e-3)
    for name, path in (("in-order", "direct"), ("hnd-to-nhd", "staged")):
        assert num_bytes(of_far[name], path) == pytest.approx(8 * MIB, rel=1e-3)


def test_wrong_bytes_are_found_and_earlier_figures_are_shown(trio: Trio) -> None:
    """In the two cases the same blocks are handed over, in another order."""
    prefill, near, _ = trio.roles
    swapped = "s/runs-256k/in-order/"
    with both(prefill, near, "--mib", "8", "--rounds", "1", between=swapped) as (_, fetching):
        status, output, errors = fetching.ended()

    assert (status, "ok: " in output) == (1, False)
    wrong = "a handoff of 'in-order' brought wrong bytes"
    assert errors.endswith(f"error: bench-decode: {wrong}\n")
    assert figures(output).keys() == CASES - {"runs-256k", "in-order"}
    failed = json.loads(output.splitlines()[-1])["failed"]
    assert failed == {"case": "in-order", "errors": [wrong]}


@pytest.mark.parametrize("ending", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
def test_side_ended_in_mid_run_is_named_in_error_of_other_side(trio: Trio, ending: str) -> None:
    prefill, _, far = trio.roles
    far.skip_log()
    with both(prefill, far, *MANY) as sides:
        wait_until(lambda: far.logged("handoff.completed"), "a handoff", ENDS_WITHIN_S)
        one, other = sides if ending == "prefill" else sides[::-1]
        one.process.send_signal(signal.SIGKILL if ending == "prefill" else signal.SIGINT)
        (status, _, errors), (other_status, _, other_errors) = one.ended(), other.ended()

    if ending == "decode":
        assert (status, errors.splitlines()[-1]) == (130, f"bench-{ending}: ended by Ctrl-C")
    error = other_errors.splitlines()[-1]
    assert (other_status, status) == (1, -9 if ending == "prefill" else 130)
    assert f"see the error of kvbus bench-{ending}" in error or "engine_lost" in error


def test_a_handoff_that_fails_ends_both_sides_at_once(trio: Trio) -> None:
    prefill, _, far = trio.roles
    with both(prefill, far, between="s/one-block/runs-256k/") as (offering, fetching):
        fetched, offered = fetching.ended(), offering.ended()
    assert (fetched[0], offered[0]) == (1, 1)
    assert "a handoff of 'runs-256k' failed with incompatible: " in fetched[2]
    assert "a handoff of 'one-block' was withdrawn: see the error of" in offered[2]


def line_of(case: str = "one-block", mib: int = 1) -> str:
    return json.dumps({"case": case, "mib": mib, "left": 3, "ticket": {}}) + "\n"


@pytest.mark.parametrize(
    ("given", "status", "error"),
    [
        (b"hello\n", 2, "'hello' is no line of kvbus bench-prefill: "),
        (b"\xff\n", 2, "is no line of kvbus bench-prefill: "),
        (line_of(mib=1025).encode(), 2, "must be at most 1024"),
        (line_of(case="of-tomorrow").encode(), 2, "there is no case 'of-tomorrow'"),
        (b"0" * ((1 << 20) + 1), 2, "is no line"),
        (b"", 1, "stdin ended before the last handoff: "),
        (None, 2, "stdin is no pipe: "),
    ],
    ids=["word", "bytes", "large", "case", "endless", "end", "tty"],
)
def test_what_is_no_line_of_the_other_side_is_refused(
    trio: Trio, given: bytes | None, status: int, error: str
) -> None:
    """It runs in this process: each of its own would import torch."""
    with contextlib.ExitStack() as stack:
        if given is None:
            controller, terminal = os.openpty()
            stack.callback(os.close, controller)
            stdin = stack.enter_context(os.fdopen(terminal))
        else:
            stdin = stack.enter_context(tempfile.TemporaryFile("w+"))
            stdin.buffer.write(given)
            stdin.seek(0)
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(sys, "stdin", stdin)
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        with pytest.raises(SystemExit) as ended:
            app(["bench-decode", "--attach", str(trio.roles[2].attach)])

    assert (ended.value.code, errors.getvalue().count("\n")) == (status, 1)
    assert errors.getvalue().startswith("error: bench-decode: ")
    assert error in errors.getvalue()
