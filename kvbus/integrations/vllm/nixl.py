"""Alias of the connector under the name of vLLM's own, for routers that choose by name.

``"kv_connector": "NixlConnector", "kv_connector_module_path": "kvbus.integrations.vllm.nixl"``

See docs/vllm.md. It is an alias, because `MultiConnector` looks up statistics by class name. A
subclass of this name would pass for vLLM's own connector.
"""

from kvbus.integrations.vllm.connector import KvbusConnector as NixlConnector

__all__ = ["NixlConnector"]
