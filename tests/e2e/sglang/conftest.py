"""Real SGLang servers; every test here is skipped, and says why, where SGLang is not installed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.sglang.clusters import CLUSTERS, NUM_TOKENS, Cluster, cluster
from tests.e2e.sglang.servers import ENVIRONMENT, STUBS, SglangServer
from tests.e2e.vllm.models import FOR_SGLANG, written

HERE = Path(__file__).parent
TIMEOUT_S = 600
"""For one test with the start of its servers."""
Alone = Callable[[Sequence[int]], list[int]]
ServerAlone = Callable[[str], SglangServer]
Launched = Callable[[str], Cluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers take their time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)


@pytest.fixture(scope="session", autouse=True)
def _sglang() -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: make test-sglang runs this")


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What SGLang's processes know of their place; a test may change it."""
    monkeypatch.syspath_prepend(str(STUBS))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from kvbus.integrations.sglang import pools

    sizes = ("attn_tp_size", "pp_size", "dp_size", "attn_cp_size", "attn_dcp_size")
    place = {**dict.fromkeys(sizes, 1), "attn_tp_rank": 0, "pp_rank": 0}
    monkeypatch.setattr(pools, "get_parallel", lambda: SimpleNamespace(**place))
    return place


@pytest.fixture(scope="session")
def models(_sglang: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, one folder each."""
    return written(tmp_path_factory.mktemp("models"), FOR_SGLANG)


@pytest.fixture(scope="session")
def server_alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAlone]:
    """SGLang without a handoff, which is asked what is right: launched, one model at a time."""
    running: dict[str, SglangServer] = {}

    def of(model: str) -> SglangServer:
        if model not in running:
            while running:
                running.popitem()[1].stop()
            folder = tmp_path_factory.mktemp("alone")
            running[model] = SglangServer(models / model, folder, ("--page-size", "16"))
            running[model].launch()
        return running[model]

    try:
        yield of
    finally:
        for server in running.values():
            server.stop()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    """The name of the model of this module's servers."""
    return CLUSTERS[request.module.CLUSTER].model


@pytest.fixture(scope="session")
def launched(
    models: Path, server_alone: ServerAlone, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launched]:
    """One of `CLUSTERS` at a time, launched with the server of `alone`."""
    running: dict[str, Cluster] = {}
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def named(name: str) -> Cluster:
            if name not in running:
                running.clear()
                last_one_ends = threads.submit(stack.close)
                server_alone(CLUSTERS[name].model)
                last_one_ends.result()
                folder = tmp_path_factory.mktemp("cluster")
                started = cluster(CLUSTERS[name], models, folder)
                running[name] = stack.enter_context(started)
            return running[name]

        yield named


@pytest.fixture(scope="module")
def running(launched: Launched, request: pytest.FixtureRequest) -> Cluster:
    """The module's `CLUSTER`, which serves."""
    pair = launched(request.module.CLUSTER)
    pair.wait_started()
    return pair


@pytest.fixture
def pair(running: Cluster) -> Iterator[Cluster]:
    """The module's cluster, which must hold nothing afterwards."""
    yield running
    running.check()


@pytest.fixture
def alone(model: str, server_alone: ServerAlone) -> Alone:
    """The tokens that SGLang says without a handoff."""
    server = server_alone(model)
    server.wait_started()
    return lambda prompt: server.generate(prompt, NUM_TOKENS)
