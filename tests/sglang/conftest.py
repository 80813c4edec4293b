"""Real SGLang servers; every test here is skipped, and says why, where SGLang is not installed."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sglang.clusters import NUM_TOKENS, Cluster, cluster
from tests.sglang.servers import SglangServer
from tests.vllm.models import written

HERE = Path(__file__).parent
TIMEOUT_S = 600
"""For one test with the start of its servers."""
Alone = Callable[[Sequence[int]], list[int]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers take their time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)


@pytest.fixture(scope="session", autouse=True)
def _sglang() -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: make test-sglang runs this")


@pytest.fixture(scope="session")
def models(_sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, one folder each."""
    return written(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def one_server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """SGLang without a handoff, which is asked what is right."""
    server = SglangServer(models / "gqa", tmp_path_factory.mktemp("alone"), ("--page-size", "16"))
    try:
        server.launch()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def _running(
    models: Path,
    one_server: SglangServer,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """The module's `CLUSTER`; it starts while the server of `alone` does."""
    folder = tmp_path_factory.mktemp("cluster")
    has_agents = getattr(request.module, "HAS_AGENTS", True)
    with cluster(request.module.CLUSTER, models, folder, has_agents=has_agents) as running:
        one_server.wait_started()
        yield running


@pytest.fixture
def pair(_running: Cluster) -> Iterator[Cluster]:
    """The module's cluster, which must hold nothing afterwards."""
    yield _running
    _running.check()


@pytest.fixture
def alone(one_server: SglangServer) -> Alone:
    """The tokens that SGLang says without a handoff."""
    return lambda prompt: one_server.generate(prompt, NUM_TOKENS)
