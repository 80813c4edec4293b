"""Real vLLM servers; every test here is skipped, and says why, where vLLM is not installed."""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import pytest

from tests.agents import Agents, agents_ended
from tests.vllm.clusters import Cluster, cluster
from tests.vllm.models import written
from tests.vllm.shapes import Shape
from tests.vllm.wirings import WIRES, Wire

HERE = Path(__file__).parent
TIMEOUT_S = 900
"""For one test with the start of its servers."""


class Running(Protocol):
    """A cluster of a shape; without ``has_agents`` a new one, whose agents a test starts."""

    def __call__(self, shape: Shape, *, has_agents: bool = True) -> Cluster: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Run the tests with vLLM's own connector: `pytest tests/vllm --wire nixl`.

    `--handoffs 100` looks longer for one that stands still.
    """
    parser.addoption("--wire", choices=sorted(WIRES), default="kvbus", help="who moves the KV")
    parser.addoption("--handoffs", type=int, default=30, help="one after the other, at TP 1 and 2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers take their time; vLLM, where a test imports it, warns of itself and others."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"))
    here = [number for number, item in enumerate(items) if HERE in item.path.parents]
    for number, item in zip(here, _by_shape([items[number] for number in here]), strict=True):
        items[number] = item


def _by_shape(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of one shape next to each other, to share its servers; who starts them is first."""
    seen: dict[int, int] = {}
    for item in items:
        seen.setdefault(id(_shape(item)), len(seen))
    return sorted(items, key=lambda item: (seen[id(_shape(item))], not _starts_servers(item)))


def _shape(item: pytest.Item) -> Shape | None:
    callspec = getattr(item, "callspec", None)
    asked = callspec.params.get("pair") if callspec is not None else None
    return asked or getattr(getattr(item, "module", None), "SHAPE", None)


def _starts_servers(item: pytest.Item) -> bool:
    return "without_agents" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-vllm runs this")


@pytest.fixture(scope="session")
def models(_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, one folder each."""
    return written(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def wire(_vllm: None, request: pytest.FixtureRequest) -> Wire:
    """Who moves the KV between two servers."""
    return WIRES[request.config.getoption("--wire", default="kvbus")]


@pytest.fixture(scope="session")
def num_handoffs(request: pytest.FixtureRequest) -> int:
    """How many handoffs are made where it takes many to see one fail."""
    number: int = request.config.getoption("--handoffs", default=30)
    return number


@pytest.fixture(scope="session")
def running(models: Path, wire: Wire) -> Iterator[Running]:
    """A cluster of the shape that is asked for: the last one, if whole and of it, or a new one."""
    last: list[tuple[Shape, Cluster]] = []
    with ExitStack() as now:

        def of_shape(shape: Shape, *, has_agents: bool = True) -> Cluster:
            is_there = bool(last) and last[0][0] is shape and last[0][1].whole
            if not is_there or not has_agents:
                last.clear()
                now.close()
                made = now.enter_context(cluster(shape, models, wire, has_agents=has_agents))
                last.append((shape, made))
            return last[0][1]

        yield of_shape


@pytest.fixture
def pair(running: Running, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster of the module's `SHAPE`, or of the test's, which must hold nothing afterwards."""
    shape = getattr(request, "param", None) or request.module.SHAPE
    made = running(shape)
    yield made
    made.check()


@pytest.fixture
def without_agents(running: Running, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """As `pair`, of servers that have just started and agents that have not."""
    made = running(request.module.SHAPE, has_agents=False)
    yield made
    made.check()


@pytest.fixture(scope="module")
def shared_agents() -> Iterator[Agents]:
    """An agent of each kind, without any vLLM."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode"))
        yield agents


@pytest.fixture
def agents(shared_agents: Agents) -> Iterator[Agents]:
    """They hold nothing after each test."""
    yield shared_agents
    shared_agents.check()
