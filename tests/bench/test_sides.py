"""`kvbus bench-prefill | kvbus bench-decode` at two agents: figures, or one line that says why not.

The agents hold nothing after each of them.
"""

import contextlib
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from kvbus.bench.caches import open_caches
from kvbus.bench.shapes import GROUP
from kvbus.bench.sides import prefill
from kvbus.bench.sides.cases import CASES
from kvbus.bench.sides.handed import Handed
from kvbus.engine import PrefillSession
from kvbus.errors import RequestTimeout, leaves
from tests.agents import AgentProcess, Agents, agents_ended

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
ENDS_WITHIN_S = 100.0
MANY = ("--mib", "1", "--rounds", "1000")
READER_GONE = "nobody reads the lines any more: look at the error of kvbus bench-decode"

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
    """The decode side with this on stdin."""
    with Side("decode", agent, stdin=subprocess.PIPE) as side:
        output, errors = side.process.communicate(text, timeout=ENDS_WITHIN_S)
        return Ended(side.process.returncode, output, errors)


def figures(output: str) -> list[dict[str, Any]]:
    """Those of the JSON object at the end."""
    found: list[dict[str, Any]] = json.loads(output.splitlines()[-1])["figures"]
    return found


def test_agents_of_one_machine_copy_what_is_mapped_in_every_case(pair: Pair) -> None:
    with both(pair.prefill, pair.near, "--mib", "1", "--rounds", "2") as (offering, fetching):
        fetched, offers = fetching.ended(), offering.ended()

    assert (offers.status, offers.errors) == (0, "")
    assert (fetched.status, fetched.errors) == (0, "")
    assert [(one["case"], one["path"], one["handoffs"]) for one in figures(fetched.output)] == [
        (case.name, "mapped", 2 * case.times) for case in CASES.values()
    ]


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_prefill_side_ends_in_mid_run(pair: Pair, number: signal.Signals) -> None:
    pair.far.skip_log()
    with both(pair.prefill, pair.far, *MANY) as (offering, fetching):
        assert pair.far.says("handoff.completed")
        offering.process.send_signal(number)
        fetched, offers = fetching.ended(), offering.ended()

    by_ctrl_c = number is signal.SIGINT
    (error,) = fetched.errors.splitlines()
    assert fetched.status == 1
    assert "look at the error of kvbus bench-prefill" in error or "engine_lost" in error
    assert (offers.status, offers.errors) == (
        (130, "bench-prefill: ended by Ctrl-C\n") if by_ctrl_c else (-9, "")
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_decode_side_ends_in_mid_run(pair: Pair, number: signal.Signals) -> None:
    pair.far.skip_log()
    with both(pair.prefill, pair.far, *MANY) as (offering, fetching):
        assert pair.far.says("handoff.completed")
        fetching.process.send_signal(number)
        fetched, offers = fetching.ended(), offering.ended()

    by_ctrl_c = number is signal.SIGINT
    (error,) = offers.errors.splitlines()
    assert (offers.status, error) == (1, f"error: bench-prefill: {READER_GONE}")
    assert (fetched.status, fetched.errors) == (
        (130, "bench-decode: ended by Ctrl-C\n") if by_ctrl_c else (-9, "")
    )


def test_a_handoff_that_fails_ends_both_sides_at_once(pair: Pair) -> None:
    with Side("prefill", pair.prefill.attach, stdin=subprocess.DEVNULL) as offering:
        assert offering.process.stdout is not None
        line = offering.process.stdout.readline()
        fetched = decode_alone(pair.far.attach, line.replace("one-block", "runs-1m"))
        offers = offering.ended()

    assert (fetched.status, offers.status) == (1, 1)
    assert fetched.errors.startswith(
        "error: bench-decode: a handoff of 'runs-1m' failed with incompatible: "
    )
    assert offers.errors == (
        "error: bench-prefill: a handoff of 'one-block' was withdrawn: look at the error of"
        " kvbus bench-decode\n"
    )


async def test_wrong_bytes_are_found_out(pair: Pair) -> None:
    case = CASES["runs-16k"]
    spec, tables = case.source.spec(f"empty-{uuid.uuid4().hex}"), case.tables(1)
    async with (
        PrefillSession(pair.prefill.attach, spec) as session,
        contextlib.AsyncExitStack() as stack,
    ):
        await open_caches(stack, pair.prefill.attach, spec, case.source, tables.capacities[0])
        await session.register()
        await session.ready()
        offer = await session.offer(
            "zeros", num_tokens=tables.num_tokens, block_ids={GROUP: tables.prefill}
        )
        line = msgspec.json.encode(Handed(case.name, 1, 0, offer.ticket)).decode() + "\n"

        fetched = await anyio.to_thread.run_sync(decode_alone, pair.far.attach, line)

    assert fetched.status == 1
    assert fetched.errors == "error: bench-decode: a handoff of 'runs-16k' brought wrong bytes\n"


def test_what_is_no_line_of_the_other_side_is_refused(pair: Pair) -> None:
    ended = decode_alone(pair.far.attach, "hello\n")

    assert (ended.status, ended.output) == (2, "")
    assert ended.errors.startswith(
        "error: bench-decode: stdin: 'hello' is no line of kvbus bench-prefill: "
    )


def test_an_agent_that_is_not_there_or_of_the_other_role_is_said(pair: Pair) -> None:
    none = pair.folder / "none"
    agents = {
        none: f"no agent at {none}",
        pair.prefill.attach: "is for prefill engines, not decode",
    }

    for attach, error in agents.items():
        ended = decode_alone(attach, line_of())
        assert (ended.status, len(ended.errors.splitlines())) == (1, 1)
        assert error in ended.errors
    with Side("prefill", pair.far.attach, stdin=subprocess.DEVNULL) as side:
        ended = side.ended()
    assert (ended.status, ended.output) == (1, "")
    assert "is for decode engines, not prefill" in ended.errors


async def test_the_prefill_side_ends_when_nobody_reads(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "READ_WITHIN_S", 0.5)
    with (tmp_path / "lines").open("w") as lines:
        monkeypatch.setattr(sys, "stdout", lines)

        with pytest.raises(ExceptionGroup) as raised:
            await prefill.prefill_side(pair.prefill.attach, num_mib=1, rounds=1)

    (error,) = leaves(raised.value)
    assert isinstance(error, RequestTimeout)
    assert error.message.startswith("nobody has read a handoff of 'one-block' for 0.5 s: ")
