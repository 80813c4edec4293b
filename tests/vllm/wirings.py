"""How two vLLM servers are told to hand KV over: by kvbus, or by vLLM's own connector.

Refuses to differ in anything else, so that one test body runs with either. vLLM's own is the control:
a test that fails with it, too, is wrong itself, or has met vLLM's own limits.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.agents import AgentProcess
from tests.plain_sockets import free_port


@dataclass(frozen=True)
class Wiring:
    """What one server gets: its ``--kv-transfer-config``, and environment variables."""

    config: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)

    def flags(self, policy: str) -> tuple[str, str]:
        """The server's flags, ``policy`` being `recompute` or `fail`."""
        config = {"kv_role": "kv_both", "kv_load_failure_policy": policy, **self.config}
        return "--kv-transfer-config", json.dumps(config)


Wire = Callable[[AgentProcess], Wiring]


def by_kvbus(agent: AgentProcess) -> Wiring:
    """A server beside ``agent``, which need not run yet."""
    return Wiring(
        {
            "kv_connector": "KvbusConnector",
            "kv_connector_module_path": "kvbus.integrations.vllm",
            "kv_connector_extra_config": {
                "endpoint": f"{agent.settings['runtime_dir']}/attach.sock"
            },
        }
    )


def by_nixl_connector(_: AgentProcess) -> Wiring:
    """A server with vLLM's own connector; the agent is not used."""
    return Wiring(
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
        {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        },
    )


WIRES: dict[str, Wire] = {"kvbus": by_kvbus, "nixl": by_nixl_connector}
