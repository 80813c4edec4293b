"""Alias of the connector under the name of vLLM's own, for routers that choose by name.

`MultiConnector` finds statistics by class name, so a subclass would pass for vLLM's connector.
"""

from kvbus.integrations.vllm.connector import KvbusConnector as NixlConnector

__all__ = ["NixlConnector"]
