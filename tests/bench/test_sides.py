"""`kvbus bench-prefill | kvbus bench-decode` at two agents: figures, or one line that says why not.

The agents hold nothing after each of them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.cli import app
from kvbus.engine import MemorySession, PrefillSession
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout
from tests.agents import AgentProcess, Agents, agents_ended, wait_until

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
ENDS_WITHIN_S = 100.0
MANY = ("--mib", "1", "--rounds", "1000")
PARTS = {
    "meeting": "meeting the prefill agent",
    "turns": "turns behind other fetches",
    "round_trips": "round trips to the prefill agent",
    "tokens": "tokens that were not ready",
    "reading": "reading: ",
    "engine": "engine and agent here",
}
CASES = {
    *("one-block", "hnd-to-nhd", "runs-512b", "runs-16k", "runs-64k", "runs-256k", "runs-1m"),
    "in-order",
}

pytestmark = pytest.mark.anyio


def line_of(case: str = "one-block", mib: int = 1, left: int = 3) -> str:
    """A line with a ticket that is none."""
    return json.dumps({"case": case, "mib": mib, "left": left, "ticket": {}}) + "\n"


class Pair(Agents):
    """A prefill agent, and two decode agents: one that maps memory, one as of another machine."""

    @property
    def prefill(self) -> AgentProcess:
        return self.all[0]

    @property
    def near(self) -> AgentProcess:
        return self.all[1]

    @property
    def far(self) -> AgentProcess:
        return self.all[2]


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    with agents_ended(Pair) as made:
        made.start(
            made.prepare("prefill"), made.prepare("decode", mapped=True), made.prepare("decode")
        )
        yield made


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The agents, which must hold nothing in the end."""
    yield shared_pair
    shared_pair.check()
    assert not any(agent.status()["engines"] for agent in shared_pair.all)


@dataclass
class Ended:
    """One side that has ended."""

    status: int
    output: str
    errors: str


class Side:
    """One command; ends with its ``with`` block."""

    def __init__(self, name: str, agent: Path, *options: str, stdin: int) -> None:
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

    def ended(self) -> Ended:
        output, errors = self.process.communicate(timeout=ENDS_WITHIN_S)
        return Ended(self.process.returncode, output or "", errors)


@contextlib.contextmanager
def both(prefill: AgentProcess, decode: AgentProcess, *options: str) -> Iterator[tuple[Side, Side]]:
    """Both sides, joined by a pipe."""
    with Side("prefill", prefill.attach, *options, stdin=subprocess.DEVNULL) as offering:
        assert offering.process.stdout is not None
        with Side(
            "decode", decode.attach, "--json", stdin=offering.process.stdout.fileno()
        ) as fetching:
            offering.process.stdout.close()  # the other side has it
            offering.process.stdout = None
            yield offering, fetching


def decode_alone(agent: Path, text: str) -> Ended:
    """The decode side with this on stdin, which comes in pieces."""
    with Side("decode", agent, stdin=subprocess.PIPE) as side:
        assert side.process.stdin is not None
        side.process.stdin.write(text[:20])
        side.process.stdin.flush()
        output, errors = side.process.communicate(text[20:], timeout=ENDS_WITHIN_S)
        return Ended(side.process.returncode, output, errors)


def figures(output: str) -> list[dict[str, Any]]:
    """Those of the JSON object at the end, whose numbers fit together."""
    found: list[dict[str, Any]] = json.loads(output.splitlines()[-1])["figures"]
    for one in found:
        parts = one["parts_ms"]
        longest = max(parts, key=parts.__getitem__)
        share, _, what = one["limit"].partition(" ")
        assert 0 < one["p50_ms"] <= one["p99_ms"]
        assert one["bytes_per_s"] == pytest.approx(one["num_bytes"] / one["p50_ms"] * 1e3, rel=1e-3)
        assert parts.keys() == PARTS.keys()
        assert share == f"{parts[longest] / sum(parts.values()):.0%}"
        assert what.startswith(PARTS[longest])
    return found


def test_agents_of_one_machine_copy_what_is_mapped_in_every_case(pair: Pair) -> None:
    with both(pair.prefill, pair.near, "--mib", "1", "--rounds", "2") as (offering, fetching):
        fetched, offers = fetching.ended(), offering.ended()

    assert (offers.status, offers.errors) == (0, "")
    assert (fetched.status, fetched.errors) == (0, "")
    found = figures(fetched.output)
    assert {one["case"] for one in found} == CASES
    assert {one["path"] for one in found} == {"mapped"}
    assert {one["handoffs"] for one in found} == {2, 20}


def test_agents_of_two_machines_take_the_path_that_fits_the_runs(pair: Pair) -> None:
    with both(pair.prefill, pair.far, "--mib", "8", "--rounds", "1") as (offering, fetching):
        fetched, offers = fetching.ended(), offering.ended()

    assert (fetched.status, offers.status) == (0, 0), fetched.errors + offers.errors
    of_8_mib = {(one["case"], one["path"], one["num_bytes"]) for one in figures(fetched.output)}
    assert len(of_8_mib) == len(CASES)
    assert of_8_mib >= {("one-block", "direct", 64 << 10), ("runs-512b", "packed", 8 << 20)}
    assert ("in-order", "direct", 8 << 20) in of_8_mib
    assert of_8_mib & {("hnd-to-nhd", path, 8 << 20) for path in ("packed", "reordered")}
    assert "A handoff of one block takes" in fetched.output
    assert "Most is" in fetched.output


@pytest.mark.parametrize(
    ("ending", "number"),
    [
        ("prefill", signal.SIGKILL),
        ("decode", signal.SIGINT),
        pytest.param("prefill", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("decode", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_side_ends_in_mid_run_and_the_other_says_whom_to_look_at(
    pair: Pair, ending: str, number: signal.Signals
) -> None:
    pair.far.skip_log()
    with both(pair.prefill, pair.far, *MANY) as (offering, fetching):
        wait_until(lambda: pair.far.logged("handoff.completed"), "a handoff", ENDS_WITHIN_S)
        (offering if ending == "prefill" else fetching).process.send_signal(number)
        fetched, offers = fetching.ended(), offering.ended()

    ended, other = (offers, fetched) if ending == "prefill" else (fetched, offers)
    by_ctrl_c = 130, f"bench-{ending}: ended by Ctrl-C\n"
    (error,) = other.errors.splitlines()
    assert (ended.status, ended.errors) == (by_ctrl_c if number is signal.SIGINT else (-9, ""))
    assert other.status == 1
    assert f"look at the error of kvbus bench-{ending}" in error or "engine_lost" in error


def test_a_handoff_that_fails_ends_both_sides_at_once(pair: Pair) -> None:
    with Side("prefill", pair.prefill.attach, stdin=subprocess.DEVNULL) as offering:
        assert offering.process.stdout is not None
        line = offering.process.stdout.readline()
        fetched = decode_alone(pair.far.attach, line.replace("one-block", "runs-1m"))
        offers = offering.ended()

    assert (fetched.status, offers.status) == (1, 1)
    assert "a handoff of 'runs-1m' failed with incompatible: " in fetched.errors
    assert "a handoff of 'one-block' was withdrawn: look at the error of" in offers.errors


async def test_wrong_bytes_are_found_out(pair: Pair) -> None:
    """An engine as that of the case `runs-16k`, with nothing in its cache."""
    layout, blocks = KvLayout.parse("NHD", cross_layer=True), list(range(64))
    group = GroupSpec("full", (0, 1), 16, 1, 128, "bfloat16")
    spec = EngineSpec(f"empty-{uuid.uuid4().hex}", "bench-2x1x128", 1, (group,))
    async with (
        PrefillSession(pair.prefill.attach, spec) as session,
        MemorySession(pair.prefill.attach, spec, 0) as memory,
    ):
        await memory.allocate(layout, num_blocks=len(blocks))
        await session.register()
        await session.ready()
        offer = await session.offer("zeros", num_tokens=1024, block_ids={"full": blocks})
        line = {"case": "runs-16k", "mib": 1, "left": 0, "ticket": offer.ticket}

        fetched = await anyio.to_thread.run_sync(
            decode_alone, pair.far.attach, json.dumps(line) + "\n"
        )

    assert fetched.status == 1
    assert fetched.errors == "error: bench-decode: a handoff of 'runs-16k' brought wrong bytes\n"


def test_an_agent_that_is_not_there_or_of_the_other_role_is_said(pair: Pair) -> None:
    none = pair.folder / "none"
    with Side("prefill", pair.far.attach, stdin=subprocess.DEVNULL) as side:
        wrong = side.ended()
    absent = decode_alone(none, line_of())

    assert [(one.status, one.output) for one in (wrong, absent)] == [(1, ""), (1, "")]
    assert "is for decode engines, not prefill" in wrong.errors
    assert f"no agent at {none}" in absent.errors


@dataclass
class Here:
    """The decode side in this process."""

    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def ended(self, agent: Path, stdin: int) -> tuple[int, str]:
        """The exit status, and what it complains of, with this as its stdin."""
        with os.fdopen(stdin) as lines, self.patch.context() as patch:
            patch.setattr(sys, "stdin", lines)
            with pytest.raises(SystemExit) as ended:
                app(["bench-decode", "--attach", str(agent)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, self.captured.readouterr().err


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        (b"hello\n", 2, "'hello' is no line of kvbus bench-prefill: "),
        (b"\xff\n", 2, "is no line of kvbus bench-prefill: "),
        (b'{"case":"one-block","mib":1}\n', 2, "missing required field `left`"),
        (line_of(mib=1025).encode(), 2, "Expected `int` <= 1024"),
        (line_of(mib=0).encode(), 2, "Expected `int` >= 1"),
        (line_of(left=-1).encode(), 2, "Expected `int` >= 0"),
        (line_of(case="of-tomorrow").encode(), 2, "there is no case 'of-tomorrow'"),
        (b"0" * ((1 << 20) + 1), 2, "is no line"),
        (b"", 1, "stdin ended before the last handoff: "),
    ],
    ids=["word", "bytes", "short", "large", "none", "negative", "case", "endless", "end"],
)
def test_what_is_no_line_of_the_other_side_is_refused(
    pair: Pair, here: Here, text: bytes, status: int, error: str
) -> None:
    lines = pair.folder / "lines"
    lines.write_bytes(text)

    ended, complaint = here.ended(pair.far.attach, os.open(lines, os.O_RDONLY))

    assert (ended, complaint.count("\n")) == (status, 1)
    assert complaint.startswith("error: bench-decode: ")
    assert error in complaint


def test_a_line_is_not_waited_for_without_end(pair: Pair, here: Here) -> None:
    here.patch.setattr("kvbus.bench.sides.handed.NEXT_WITHIN_S", 0.1)
    reading, writing = os.pipe()

    ended = here.ended(pair.far.attach, reading)
    os.close(writing)

    assert ended[0] == 1
    assert "no line came for 0.1 s: " in ended[1]


def test_a_terminal_is_no_pipe(pair: Pair, here: Here) -> None:
    controller, terminal = os.openpty()

    ended = here.ended(pair.far.attach, terminal)
    os.close(controller)

    assert ended[0] == 2
    assert "stdin is no pipe: " in ended[1]


def test_the_prefill_side_ends_when_nobody_reads(pair: Pair, here: Here, tmp_path: Path) -> None:
    here.patch.setattr("kvbus.bench.sides.prefill.READ_WITHIN_S", 0.5)
    with (tmp_path / "lines").open("w") as lines, here.patch.context() as patch:
        patch.setattr(sys, "stdout", lines)
        with pytest.raises(SystemExit) as ended:
            app(["bench-prefill", "--attach", str(pair.prefill.attach), "--mib", "1"])

    assert ended.value.code == 1
    assert "nobody has read a handoff of 'one-block' for 0.5 s: " in here.captured.readouterr().err
