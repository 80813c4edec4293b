"""Real SGLang servers; every test here is skipped, and says why, where SGLang is not installed."""

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.spawn import free_port
from tests.e2e.sglang.backend import Managers, is_served
from tests.e2e.sglang.clusters import CLUSTERS, NUM_TOKENS, Cluster, cluster
from tests.e2e.sglang.pooled import head_pool, queue_of
from tests.e2e.sglang.servers import ENVIRONMENT, STUBS, SglangServer
from tests.e2e.vllm.models import FOR_SGLANG, written
from tests.support.agents import Agents, started, wait_until

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
    from kvbus.integrations.sglang import pools, refusals

    sizes = ("attn_tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "attn_dcp_size")
    place = {**dict.fromkeys(sizes, 1), "attn_tp_rank": 0, "pp_rank": 0, "num_dp_ranks": 1}
    for module in (pools, refusals):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(**place))
    return place


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    with started("prefill", "decode") as both:
        yield both
        both.check()


@pytest.fixture
def managers(
    one_rank: dict[str, int], agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Managers]:
    """Makes the manager of a role: SGLang's part of it needs a whole server, and is set here."""
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.events import KvEventLoraNames

    from kvbus.integrations.sglang.transfer import Manager

    made: list[Any] = []
    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))
    monkeypatch.setenv("KVBUS_MODEL", "model")

    def of(role: str, queue: Any = None, states: Sequence[Any] = (), name: str = "") -> Any:
        agent = agents.all[0] if role == "prefill" else agents.all[1]
        monkeypatch.setenv("KVBUS_ATTACH", str(agent.attach))
        monkeypatch.setenv("KVBUS_ENGINE_ID", name or f"{role}-{uuid.uuid4().hex}")
        queue = queue or queue_of(head_pool())
        page_size = queue.token_to_kv_pool.page_size
        manager = Manager.__new__(Manager)
        manager.__dict__.update(
            kv_args=SimpleNamespace(page_size=page_size, state_types=list(states)),
            disaggregation_mode=DisaggregationMode(role),
            server_args=None,
            attn_tp_size=1,
            is_dummy_cp_rank=False,
            bootstrap_timeout=60.0,
            waiting_timeout=60.0,
            request_status={},
            failure_records={},
            failure_lock=threading.Lock(),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _staging_outstanding=defaultdict(int),
            addr_to_rooms_tracker=defaultdict(set),
            prefill_response_tracker={},
            prefill_info_table={},
        )
        queue.scheduler.server_args.disaggregation_mode = role
        queue.scheduler.kv_event_lora_names = KvEventLoraNames()
        manager.begin(queue)
        assert manager.link.wait_open(30)
        manager.pool = queue.token_to_kv_pool
        made.append(manager)
        return manager

    yield of
    for manager in made:
        manager.link.close()


@pytest.fixture
def bootstrap(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Starts the bootstrap server of the prefill server, and returns its address."""
    from kvbus.integrations.sglang.places import BootstrapServer

    servers: list[Any] = []

    def address() -> str:
        monkeypatch.setenv("KVBUS_ATTACH", str(agents.all[0].attach))
        server = BootstrapServer("127.0.0.1", free_port())
        servers.append(server)
        wait_until(lambda: is_served(server.port), "a bootstrap server")
        return f"127.0.0.1:{server.port}"

    yield address
    for server in servers:
        server.close()


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
