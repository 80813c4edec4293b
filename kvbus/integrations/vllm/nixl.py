"""The connector by the name of vLLM's own, as `MultiConnector` finds statistics by class name."""

from kvbus.integrations.vllm.connector import KvbusConnector as NixlConnector

__all__ = ["NixlConnector"]
