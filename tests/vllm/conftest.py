"""Real vLLM servers; every test here is skipped, and says why, where vLLM is not installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.clusters import Cluster, cluster
from tests.vllm.models import written
from tests.vllm.shapes import Shape
from tests.vllm.wirings import WIRES, Wire

HERE = Path(__file__).parent
TIMEOUT_S = 900
"""For one test with the start of its servers."""

Running = Callable[[Shape], Cluster]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Run the tests with vLLM's own connector: `pytest tests/vllm --wire nixl`."""
    parser.addoption("--wire", choices=sorted(WIRES), default="kvbus", help="who moves the KV")


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


@pytest.fixture(scope="session")
def wire(_vllm: None, request: pytest.FixtureRequest) -> Wire:
    """Who moves the KV between two servers."""
    return WIRES[request.config.getoption("--wire", default="kvbus")]


@pytest.fixture(scope="session")
def running(models: Path, wire: Wire) -> Iterator[Running]:
    """A cluster of the shape that is asked for: the last one, if whole and of it, or a new one."""
    last: list[tuple[Shape, Cluster]] = []
    with ExitStack() as now:

        def of_shape(shape: Shape) -> Cluster:
            if not last or last[0][0] is not shape or not last[0][1].whole:
                last.clear()
                now.close()
                last.append((shape, now.enter_context(cluster(shape, models, wire))))
            return last[0][1]

        yield of_shape


@pytest.fixture
def pair(running: Running, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster of the module's `SHAPE`, or of the test's, which must hold nothing afterwards."""
    shape = getattr(request, "param", None) or request.module.SHAPE
    made = running(shape)
    yield made
    made.check()
