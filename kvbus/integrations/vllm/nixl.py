"""The connector under the name of vLLM's own: some routers and platforms choose by that name.

``"kv_connector": "NixlConnector", "kv_connector_module_path": "kvbus.integrations.vllm.nixl"``;
see docs/vllm.md. This is an alias, not a subclass: `MultiConnector` looks up statistics by the
name of a class, and would take a subclass of this name for vLLM's own connector.
"""

from kvbus.integrations.vllm.connector import KvbusConnector as NixlConnector

__all__ = ["NixlConnector"]
