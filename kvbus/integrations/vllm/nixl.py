"""The connector under the name of vLLM's own: some routers and platforms choose by that name.

``"kv_connector": "NixlConnector", "kv_connector_module_path": "kvbus.integrations.vllm.nixl"``;
see docs/vllm.md.
"""

from kvbus.integrations.vllm.connector import KvbusConnector


class NixlConnector(KvbusConnector):
    """`KvbusConnector`, no more and no less."""
