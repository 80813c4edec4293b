"""What vLLM finds in the connector: its names, its methods, its metrics."""

from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import REGISTRY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kvbus.integrations.vllm import KvbusConnector
from tests.e2e.integrations.vllm_contract import differences, record

NOT_YET = {"supports_sleep_mode: vLLM does not call it"}
"""What a newer vLLM asks for."""
NAMES = (
    ("KvbusConnector", "kvbus.integrations.vllm"),
    ("NixlConnector", "kvbus.integrations.vllm.nixl"),
)


def test_the_connector_fits_the_vllm_that_is_installed() -> None:
    """The newest one that was written down is looked at in tests/e2e/integrations."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parents[1]

    def read(name: str) -> str | None:
        path = root / name
        return path.read_text() if path.is_file() else None

    assert set(differences(record("installed", read))) <= NOT_YET


@pytest.mark.parametrize(("name", "module"), NAMES)
def test_vllm_takes_the_connector_from_the_module_that_is_named(name: str, module: str) -> None:
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")

    assert KVConnectorFactory.get_connector_class(config) is KvbusConnector


@pytest.fixture
def _plugin() -> None:
    """vLLM has called kvbus' plugin, more than once."""
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvbus")
    for _ in range(2):
        plugin.load()()


@pytest.mark.usefixtures("_plugin")
def test_vllm_finds_kvbus_connector_and_its_own_by_name() -> None:
    by_name = KVConnectorFactory.get_connector_class_by_name

    config = KVTransferConfig(kv_connector="KvbusConnector", kv_role="kv_both")

    assert KVConnectorFactory.get_connector_class(config) is KvbusConnector
    assert by_name("NixlConnector") is NixlConnector


@pytest.mark.usefixtures("_plugin")
@pytest.mark.parametrize(("name", "module"), NAMES)
def test_api_server_reads_stats_of_multi_connector_child(name: str, module: str) -> None:
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
    found = KVConnectorFactory.get_connector_class(config)
    figures = KvbusConnector.build_kv_connector_stats()
    figures.add("loads", "completed")

    read: Any = MultiConnector.build_kv_connector_stats({found.__name__: figures.to_dict()})

    assert read.data == {found.__name__: figures}


def test_sleep_mode_is_refused() -> None:
    assert not KvbusConnector.supports_sleep_mode(KVTransferConfig(kv_role="kv_both"))


def test_every_figure_is_on_page_under_its_engine() -> None:
    figures: Any = KvbusConnector.build_kv_connector_stats()
    figures.data["loads"] += 2 * ["failed"]
    figures.data["loads_failed"] += ["reading", "requested"]
    figures.data["load_stage_seconds"] += [("reading", "failed", 0.5)]
    figures.data["load_stage_seconds"] += [
        ("reading", "completed", 0.25),
        ("queued", "completed", 9),
    ]
    figures.data["load_bytes"] += [4096]
    figures.data["offers"] += ["expired", "completed"]
    types: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    engines: dict[int, list[object]] = {0: ["0"], 1: ["1"]}
    metrics: Any = KvbusConnector.build_prom_metrics(config, types, ["engine"], engines)

    metrics.observe(figures.to_dict(), engine_idx=1)

    page = generate_latest(REGISTRY).decode()
    for line in (
        'vllm:kvbus_loads_total{engine="1",outcome="failed"} 2.0',
        'vllm:kvbus_loads_total{engine="0",outcome="failed"} 0.0',
        'vllm:kvbus_loads_failed_total{engine="1",stage="reading"} 1.0',
        'vllm:kvbus_loads_failed_total{engine="1",stage="requested"} 1.0',
        'vllm:kvbus_loads_failed_total{engine="1",stage="committing"} 0.0',
        'vllm:kvbus_load_stage_seconds_sum{engine="1",outcome="failed",stage="reading"} 0.5',
        'vllm:kvbus_offers_total{engine="0",outcome="expired"} 0.0',
        'vllm:kvbus_offered_tokens_total{engine="0"} 0.0',
        'vllm:nixl_xfer_time_seconds_count{engine="1"} 1.0',
        'vllm:nixl_xfer_time_seconds_sum{engine="1"} 0.25',
        'vllm:nixl_bytes_transferred_sum{engine="1"} 4096.0',
        'vllm:nixl_num_failed_transfers_total{engine="1"} 2.0',
        'vllm:nixl_num_kv_expired_reqs_total{engine="1"} 1.0',
        'vllm:nixl_num_kv_expired_reqs_total{engine="0"} 0.0',
    ):
        assert line in page.splitlines()
    assert figures.reduce()["KV loads failed, reading"] == 1


def test_nixl_connector_beside_keeps_its_metric_names() -> None:
    """vLLM makes metrics of children in their order; kvbus is the first."""
    registry = CollectorRegistry()
    types: Any = {one: partial(one, registry=registry) for one in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    engines: dict[int, list[object]] = {0: ["0"]}
    figures: Any = KvbusConnector.build_kv_connector_stats()
    figures.add("load_bytes", 4096)

    ours: Any = KvbusConnector.build_prom_metrics(config, types, ["engine"], engines)
    NixlConnector.build_prom_metrics(config, types, ["engine"], engines)
    ours.observe(figures.to_dict())

    lines = generate_latest(registry).decode().splitlines()
    assert 'vllm:kvbus_load_bytes_sum{engine="0"} 4096.0' in lines
    assert 'vllm:nixl_bytes_transferred_sum{engine="0"} 0.0' in lines
