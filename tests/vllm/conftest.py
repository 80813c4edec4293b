"""Real vLLM servers; every test here is skipped, and says why, where vLLM is not installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agents import Agents, agents_ended
from tests.vllm.clusters import Cluster, cluster
from tests.vllm.models import written

if TYPE_CHECKING:
    from tests.vllm.scheduled import EngineOf

HERE = Path(__file__).parent
TIMEOUT_S = 900
"""For one test with the start of its servers."""

Running = Callable[..., Cluster]
"""The cluster of a module, a new one if it is not whole; without ``has_agents`` always a new one,
whose agents a test starts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers take their time; vLLM, where a test imports it, warns of itself and others."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-vllm runs this")


@pytest.fixture(scope="session")
def models(_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, one folder each."""
    return written(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def running(models: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """That of the module's `CLUSTER`, or of a parameter; it ends before another one starts."""
    name = getattr(request, "param", None) or request.module.CLUSTER
    last: list[Cluster] = []
    with ExitStack() as now:

        def made(*, has_agents: bool = True) -> Cluster:
            if not last or not last[0].whole or not has_agents:
                now.close()
                last[:] = [now.enter_context(cluster(name, models, has_agents=has_agents))]
            return last[0]

        yield made


@pytest.fixture
def pair(running: Running) -> Iterator[Cluster]:
    """The cluster, which must hold nothing afterwards."""
    made = running()
    yield made
    made.check()


@pytest.fixture
def without_agents(running: Running) -> Iterator[Cluster]:
    """As `pair`, of servers that have just started and agents that have not."""
    made = running(has_agents=False)
    yield made
    made.check()


@pytest.fixture(scope="session")
def engine_of(_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> "EngineOf":
    """Begins engines that are vLLM's scheduler, without a model."""
    from tests.vllm.scheduled import engines_of

    return engines_of(tmp_path_factory.mktemp("model"))


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
