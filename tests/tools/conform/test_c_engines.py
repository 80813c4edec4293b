"""The engines in examples/c follow the page, and hand KV to each other through real agents."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.support.agents import AgentProcess, Agents, wait_until
from tests.tools.conform.conftest import ROLES, Play, Run

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "examples" / "c"
PROBE = b"#include <zmq.h>\n#include <msgpack.h>\nint main(void) { return 0; }\n"
NEEDED = "gcc make libzmq3-dev libmsgpack-dev"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both programs; skips where they cannot be built."""
    folder = tmp_path_factory.mktemp("c") / "engines"
    make, compiler = shutil.which("make"), shutil.which(os.environ.get("CC", "cc"))
    command = [str(compiler), "-fsyntax-only", "-x", "c", "-"]
    if not (
        make and compiler and subprocess.run(command, input=PROBE, check=False).returncode == 0
    ):
        pytest.skip(f"no C compiler with libzmq and msgpack here: on Debian, install {NEEDED}")
    shutil.copytree(SOURCES, folder)
    subprocess.run([make, "-C", folder, "clean", "all"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def built_by_cmake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs that the command of the page builds; skips without CMake."""
    folder = tmp_path_factory.mktemp("cmake")
    if not all(map(shutil.which, ("cmake", "pkg-config", "c++"))):
        pytest.skip(f"no CMake here: on Debian, install {NEEDED} g++ cmake pkg-config")
    page = (ROOT / "docs" / "minimal-engine.md").read_text()
    command = next(line for line in page.splitlines() if "cmake -S" in line)
    subprocess.run(  # noqa: S602  our own page
        command.replace("build/c", str(folder)).replace("-S", "-DKVBUS_WERROR=ON -S"),
        shell=True,
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


class Engine:
    def __init__(self, program: Path, agent: AgentProcess, *arguments: str) -> None:
        env = {**os.environ, "KVBUS_ATTACH": str(agent.attach), "KVBUS_ROLE": agent.role}
        self._process = subprocess.Popen(
            [program, *arguments], env=env, stdin=PIPE, stdout=PIPE, text=True
        )
        assert self._process.stdin
        assert self._process.stdout
        self._lines, self._answers = self._process.stdin, self._process.stdout
        self._told: dict[tuple[str, str], str] = {}

    def end(self) -> None:
        self._lines.close()
        status = self._process.wait(60)
        self._answers.close()
        assert status == 0

    def say(self, *words: object) -> None:
        self._lines.write(f"{' '.join(map(str, words))}\n")
        self._lines.flush()

    def told(self, word: str, name: int) -> str:
        """Return what it reports of this name with this word, once it does."""
        while (word, str(name)) not in self._told:
            line = self._answers.readline()
            assert line, f"the engine has ended, and never reported: {word} {name}"
            said, of, *rest = line.rstrip("\n").split(" ", 2)
            assert said != "refused", line
            self._told[said, of] = "".join(rest)
        return self._told[word, str(name)]


@pytest.fixture
def engines(built: Path, fresh: Agents) -> Iterator[tuple[Engine, Engine]]:
    """One of each role at an agent of its own, ready."""
    fresh.start(prefill := fresh.prepare("prefill"), decode := fresh.prepare("decode"))
    pair = Engine(built / "prefill", prefill), Engine(built / "decode", decode)
    wait_until_ready(fresh)
    yield pair
    for engine in pair:
        engine.end()


def wait_until_ready(agents: Agents) -> None:
    def are_ready() -> bool:
        return all([*agent.status()["engines"].values()] == [True] for agent in agents.all)

    wait_until(are_ready, "both engines are ready")


def hand_over(source: Engine, target: Engine, name: int, *counts: int, first: int = 0) -> str:
    source.say("offer", name, *counts)
    target.say("fetch", name, first, counts[-1], source.told("ticket", name))
    return target.told("fetched", name)


def test_an_engine_in_c_breaks_no_rule(run: Run, built: Path) -> None:
    prefill, decode = run([Play(role, (str(built / role),)) for role in ROLES])

    assert prefill.seen("failed") == decode.seen("failed") == set()
    # That of prefill ends its offers with their agent.
    assert (prefill.seen("untried"), decode.seen("untried")) == ({"offer.again"}, set())


@pytest.mark.parametrize("role", ROLES)
def test_c_engine_without_agent_says_once_where_it_looks_for_one(
    built: Path, tmp_path: Path, role: str
) -> None:
    at = tmp_path / "attach.sock"
    env = {**os.environ, "KVBUS_ATTACH": str(at)}
    with subprocess.Popen([built / role], env=env, stderr=PIPE, text=True) as engine:
        assert engine.stderr
        first = engine.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            engine.wait(0.5)
        engine.kill()
        others = engine.stderr.read()

    assert (first, others) == (f"waiting for an agent at {at}\n", "")


def test_engines_in_c_hand_kv_over_and_survive_their_agents(
    engines: tuple[Engine, Engine], fresh: Agents
) -> None:
    source, target = engines

    assert hand_over(source, target, 7, 100) == "completed 0"
    assert hand_over(source, target, 8, 90, first=37) == "completed 0"
    assert hand_over(source, target, 9, 20, 40, 70) == "completed 0"
    assert [source.told("released", name) for name in (7, 8, 9)] == ["completed"] * 3
    source.say("offer", 10, 100)
    source.told("ticket", 10)
    for agent in fresh.all:
        agent.kill()
        agent.start()

    assert source.told("released", 10) == "lost"  # 11 waits until both are registered again
    assert hand_over(source, target, 11, 100) == "completed 0"


def test_engines_of_the_cmake_project_hand_kv_over(built_by_cmake: Path, fresh: Agents) -> None:
    fresh.start(prefill := fresh.prepare("prefill"), decode := fresh.prepare("decode"))
    target = Engine(built_by_cmake / "decode", decode)
    source = Engine(built_by_cmake / "offer", prefill, "7", "100")
    target.say("fetch", 7, 0, 100, source.told("ticket", 7))

    assert target.told("fetched", 7) == "completed 0"
    assert source.told("released", 7) == "completed"
    for engine in (source, target):
        engine.end()


@pytest.mark.parametrize(
    ("name", "problem"), [("attach.sock", "no agent replies at"), ("a" * 108, "use a shorter")]
)
def test_cpp_engine_without_agent_ends_with_the_reason(
    built_by_cmake: Path, tmp_path: Path, name: str, problem: str
) -> None:
    env = {**os.environ, "KVBUS_ATTACH": str(tmp_path / name)}
    command = built_by_cmake / "offer"
    ended = subprocess.run([command, "7", "100"], env=env, stderr=PIPE, text=True, check=False)

    assert ended.returncode == 1
    assert problem in ended.stderr


@pytest.fixture(scope="session")
def client(built_by_cmake: Path) -> Path:
    """A program over ``kvbus.hpp``."""
    flags = "pkg-config --cflags --libs libzmq"
    packages = subprocess.check_output(  # noqa: S602  no input
        f"{flags} msgpack-c || {flags} msgpack", shell=True, text=True
    )
    source, program = Path(__file__).with_name("client.cpp"), built_by_cmake / "client"
    library = built_by_cmake / "libkvbus_client.a"
    compiler = str(shutil.which(os.environ.get("CXX", "c++")))
    options = "-std=c++17", "-Wall", "-Wextra", "-Werror"
    files = f"-I{SOURCES}", source, library, "-o", program
    subprocess.run([compiler, *options, *files, *packages.split()], check=True)
    return program


def test_cpp_client_reports_exceptions_of_callbacks_and_the_end_of_the_agent(
    client: Path, fresh: Agents
) -> None:
    fresh.start(agent := fresh.prepare("prefill"))
    with subprocess.Popen([client, agent.attach], stdout=PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "thrown by a callback\n"
        assert process.stdout.readline().startswith("not_registered: ")
        agent.kill()
        assert process.stdout.read() == "lost\nended\n"
    assert process.returncode == 0
