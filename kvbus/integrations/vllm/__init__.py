"""vLLM as a client of kvbus: ``kv_connector_module_path`` of its ``--kv-transfer-config``.

What is here stands on vLLM's public connector base class, that of 0.32 and later.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbus.integrations.vllm.connector import KvbusConnector

__all__ = ["KvbusConnector"]


def __getattr__(name: str) -> type:
    """The connector, loaded when vLLM asks for it: the rest is of use without vLLM, too."""
    if name != "KvbusConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvbus.integrations.vllm.connector import KvbusConnector  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"KvbusConnector needs vLLM 0.32 or later: {error}") from error
    return KvbusConnector
