"""The engines in examples/c keep to the page, and hand KV to each other through real agents."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.conform.book import Verdict
from kvbus.conform.engine_process import EngineProcess
from kvbus.conform.play import play
from kvbus.protocol import AgentRole
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.conform.engines import named

SOURCES = Path(__file__).parents[2] / "examples" / "c"
PROBE = "#include <zmq.h>\n#include <msgpack.h>\nint main(void) { return 0; }\n"
NEEDED = "gcc make libzmq3-dev libmsgpack-dev"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both programs; skips where they cannot be built."""
    folder = tmp_path_factory.mktemp("c") / "engines"
    make = shutil.which("make")
    if not (make and can_compile()):
        pytest.skip(f"no C compiler with libzmq and msgpack here: on Debian, install {NEEDED}")
    shutil.copytree(SOURCES, folder)
    subprocess.run([make, "-C", folder, "clean", "all"], check=True, capture_output=True)
    return folder


def can_compile() -> bool:
    if not (compiler := shutil.which(os.environ.get("CC", "cc"))):
        return False
    command = [compiler, "-fsyntax-only", "-x", "c", "-"]
    tried = subprocess.run(command, input=PROBE.encode(), capture_output=True, check=False)
    return tried.returncode == 0


@pytest.fixture
def agents() -> Iterator[Agents]:
    """A prefill agent and a decode agent."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode"))
        yield agents
        agents.check()


@pytest.fixture
def engines(
    built: Path, agents: Agents, tmp_path: Path
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """One engine of each role, with an agent each."""
    both = [
        EngineProcess([str(built / role)], agent.attach, role, tmp_path / role)
        for role, agent in zip(AgentRole, agents.all, strict=True)
    ]
    for engine in both:
        engine.start()
    yield both[0], both[1]
    assert [engine.stop() for engine in both] == [0, 0]


def told(engine: EngineProcess, word: str, name: int) -> str:
    """What the engine says with this word, once it does."""

    def read() -> bool:
        engine.on_readable()
        return bool(engine.told(word, name))

    wait_until(read, f"{word} {name}")
    (text,) = engine.told(word, name)
    return text


def hand_over(
    source: EngineProcess, target: EngineProcess, name: int, *counts: int, first: int = 0
) -> str:
    """What the decode engine says of the KV that it got."""
    source.say("offer", name, *counts)
    ticket = told(source, "ticket", name)
    target.say("fetch", name, first, counts[-1], ticket)
    return told(target, "fetched", name)


def serves(agent: AgentProcess) -> bool:
    """Whether its one engine is ready."""
    return list(agent.status()["engines"].values()) == [True]


@pytest.mark.parametrize("role", AgentRole)
def test_an_engine_in_c_breaks_no_rule(role: AgentRole, built: Path, tmp_path: Path) -> None:
    outcomes = play(role, [str(built / role)], log=tmp_path / "log")

    assert named(outcomes, Verdict.FAILED) == {}
    assert named(outcomes, Verdict.UNTRIED) == {}


def test_engines_in_c_hand_kv_over_through_real_agents(
    engines: tuple[EngineProcess, EngineProcess], agents: Agents
) -> None:
    source, target = engines
    wait_until(lambda: all(map(serves, agents.all)), "both engines are ready")

    assert hand_over(source, target, 7, 100) == "completed 0"
    assert hand_over(source, target, 8, 90, first=37) == "completed 0"
    assert hand_over(source, target, 9, 20, 40, 70) == "completed 0"
    assert [told(source, "released", name) for name in (7, 8, 9)] == ["completed"] * 3


def test_engines_in_c_go_on_with_agents_that_were_killed(
    engines: tuple[EngineProcess, EngineProcess], agents: Agents
) -> None:
    source, target = engines
    wait_until(lambda: all(map(serves, agents.all)), "both engines are ready")
    source.say("offer", 7, 100)
    told(source, "ticket", 7)
    for agent in agents.all:
        agent.kill()
        agent.start()
    wait_until(lambda: all(map(serves, agents.all)), "both engines are ready again")

    assert told(source, "released", 7) == "lost"
    assert hand_over(source, target, 8, 100) == "completed 0"
