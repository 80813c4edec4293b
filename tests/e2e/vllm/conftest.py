"""Real vLLM servers; every test here is skipped, and says why, where vLLM is not installed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.vllm.clusters import Cluster, cluster
from tests.e2e.vllm.models import written
from tests.support.agents import Agents, started

if TYPE_CHECKING:
    from tests.e2e.vllm.scheduled import EngineOf, Pair

HERE = Path(__file__).parent
Running = Callable[..., Cluster]
TIMEOUT_S = 900
"""For one test with the start of its servers."""


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
    """The module's `CLUSTER`, one at a time: the last one that was started, if it is whole.

    Without ``has_agents`` a new one, whose agents a test starts.
    """
    last: list[Cluster] = []
    with ExitStack() as now:

        def made(*, has_agents: bool = True) -> Cluster:
            if not last or not last[0].whole or not has_agents:
                now.close()
                one = cluster(request.module.CLUSTER, models, has_agents=has_agents)
                last[:] = [now.enter_context(one)]
            return last[0]

        yield made
        if last and hasattr(request.module, "CHECKED_AT_LAST"):
            last[0].check()


@pytest.fixture
def pair(running: Running, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster, which must hold nothing afterwards; with ``False`` its agents do not run yet.

    A module with `CHECKED_AT_LAST` leaves tickets to expire; its cluster must hold nothing at last.
    """
    made = running(has_agents=getattr(request, "param", True))
    yield made
    if not hasattr(request.module, "CHECKED_AT_LAST"):
        made.check()


@pytest.fixture(scope="session")
def engine_of(_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["EngineOf"]:
    """Begins engines that are vLLM's scheduler, without a model."""
    from tests.e2e.vllm.scheduled import engines_of

    with engines_of(tmp_path_factory.mktemp("model")) as begin:
        yield begin


@pytest.fixture(scope="module")
def shared_agents() -> Iterator[Agents]:
    """An agent of each kind, without any vLLM."""
    with started("prefill", "decode") as agents:
        yield agents


@pytest.fixture
def agents(shared_agents: Agents) -> Iterator[Agents]:
    """They run before each test, and hold nothing after it."""
    shared_agents.start(*(agent for agent in shared_agents.all if not agent.alive))
    yield shared_agents
    for agent in shared_agents.all:
        if agent.alive:
            agent.signal(signal.SIGCONT)
    shared_agents.check()


@pytest.fixture
def engines(agents: Agents, engine_of: "EngineOf") -> Iterator["Pair"]:
    """Engines of models without windows, one beside each agent."""
    from tests.e2e.vllm.scheduled import pair_of

    with pair_of(agents, engine_of) as made:
        yield made
