"""Ray's own builder for P/D, with kvbus as the connector of both sides."""

from collections.abc import Mapping
from typing import Any

from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import LLMConfig
from ray.serve.llm import build_pd_openai_app as ray_build_pd_openai_app

from kvbus.errors import ConfigError
from kvbus.integrations.ray.backend import KvbusConnectorBackend

CONNECTOR = "KvbusConnector"
ROLES = {"prefill_config": "kv_producer", "decode_config": "kv_consumer"}


def register() -> None:
    """Make the connector known to all processes of the Ray cluster; done by the builder."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, KvbusConnectorBackend)


def build_pd_openai_app(
    pd_serving_args: Mapping[str, Any], *, agent: Mapping[str, Any] | None = None
) -> Any:
    """As Ray's, which gets ``pd_serving_args``; ``agent`` are keys of the agents' configuration.

    A side that has a ``kv_transfer_config`` keeps it, and its keys of ``agent`` are over these.
    Raises `ConfigError`.
    """
    args = dict(pd_serving_args)
    for side, role in ROLES.items():
        config = LLMConfig.model_validate(args.get(side)).model_copy(deep=True)
        transfer = config.engine_kwargs.setdefault("kv_transfer_config", {})
        if transfer.setdefault("kv_connector", CONNECTOR) != CONNECTOR:
            raise ConfigError(
                f"{side}: kv_transfer_config has the connector '{transfer['kv_connector']}'; leave "
                "kv_transfer_config out"
            )
        transfer.setdefault("kv_connector_module_path", "kvbus.integrations.vllm")
        transfer.setdefault("kv_role", role)
        extra = transfer.setdefault("kv_connector_extra_config", {})
        extra["agent"] = {**(agent or {}), **extra.get("agent", {})}
        args[side] = config
    register()
    return ray_build_pd_openai_app(args)
