"""Ray Serve's P/D serving with kvbus: an agent beside each replica, both requests at the same time.

decode replica ── chooses a prefill replica ──▶ its metadata: the address of its agent
               ── names the offer (rendezvous) and sends both requests together
"""

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    DefaultPDProtocolMixin,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import LLMConfig
from ray.serve.llm import build_pd_openai_app as ray_build_pd_openai_app

from kvbus.errors import ConfigError
from kvbus.integrations.keeper import KeptAgent
from kvbus.protocol.ticket import MAX_REQUEST_ID, Rendezvous

__all__ = ["KvbusConnectorBackend", "build_pd_openai_app", "register"]

CONNECTOR = "KvbusConnector"
MAX_RENDEZVOUS = 1024  # of prefill requests whose decode request has not come
AGENTS = {"kv_producer": "prefill", "kv_consumer": "decode"}
SIDES = {"prefill_config": "kv_producer", "decode_config": "kv_consumer"}


class KvbusConnectorBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    requires_peer_binding = True

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self._agent: KeptAgent | None = None
        self._rendezvous: OrderedDict[str, Rendezvous] = OrderedDict()
        self._signs = False

    @property
    def concurrent_handoff(self) -> bool:
        """False with signed tickets: Ray has no key to sign a rendezvous."""
        return not self._signs

    def setup(self) -> None:
        """Start the replica's agent, and wait for it. Raises `ConfigError` or `PeerLost`."""
        config = self.kv_transfer_config
        role = AGENTS.get(config.get("kv_role"))
        if role is None:
            raise ConfigError(
                f"kv_role is {config.get('kv_role')!r}; with Ray it is kv_producer for prefill, "
                "kv_consumer for decode"
            )
        extra = config.setdefault("kv_connector_extra_config", {})
        settings = dict(extra.pop("agent", {}))
        self._signs = bool(settings.get("ticket_keys"))
        self._agent = KeptAgent.start(role, ray.util.get_node_ip_address(), settings)
        extra["endpoint"] = str(self._agent.attach)

    def replica_metadata(self) -> dict[str, Any]:
        if self._agent is None:
            return {}
        return {"kvbus": {"endpoint": self._agent.peer, "server_key": self._agent.server_key}}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        shaped = super().prepare_prefill_request(request=request, peer=peer)
        address = (peer or {}).get("kvbus")
        if address is not None and self.concurrent_handoff:
            rendezvous = Rendezvous(
                secrets.token_hex(16),
                address["endpoint"],
                address["server_key"],
                request_id=str(request.request_id)[:MAX_REQUEST_ID],
            )
            shaped.kv_transfer_params["transfer_id"] = rendezvous.transfer_id
            self._rendezvous[request.request_id] = rendezvous
            while len(self._rendezvous) > MAX_RENDEZVOUS:
                self._rendezvous.popitem(last=False)
        return shaped

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any | None
    ) -> Any:
        shaped = super().prepare_decode_request(
            request=request, peer=peer, prefill_response=prefill_response
        )
        rendezvous = self._rendezvous.pop(request.request_id, None)
        if rendezvous is not None and prefill_response is None:
            shaped.kv_transfer_params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "rendezvous": rendezvous.to_json(),
            }
        return shaped


def register() -> None:
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, KvbusConnectorBackend)


def build_pd_openai_app(
    pd_serving_args: Mapping[str, Any], *, agent: Mapping[str, Any] | None = None
) -> Any:
    """A side's own ``agent`` keys take precedence. Raises `ConfigError`."""
    args = dict(pd_serving_args)
    for side, role in SIDES.items():
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
