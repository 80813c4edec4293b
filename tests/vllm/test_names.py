"""The names under which vLLM finds the connector."""

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kvbus.integrations.vllm import KvbusConnector


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("KvbusConnector", "kvbus.integrations.vllm"),
        ("NixlConnector", "kvbus.integrations.vllm.nixl"),
    ],
)
def test_vllm_takes_the_connector_from_the_module_that_is_named(name: str, module: str) -> None:
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")

    found = KVConnectorFactory.get_connector_class(config)

    assert found.__name__ == name
    assert issubclass(found, KvbusConnector)
    assert found is not NixlConnector
