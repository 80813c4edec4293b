"""How two vLLM servers are told to hand KV over: by kvbus, or by vLLM's own connector.

Refuses to differ in anything else, so that one test body runs with either. vLLM's own is the
control: what fails with it, too, is a wrong test, or a limit of vLLM itself.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbus.spawn import free_port
from tests.agents import AgentProcess, wait_until
from tests.vllm.servers import VllmServer

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Wiring:
    """What one server gets: its ``--kv-transfer-config``, and environment variables."""

    config: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)

    def flags(self, policy: str) -> tuple[str, str]:
        """The server's flags, ``policy`` being `recompute` or `fail`."""
        config = {"kv_role": "kv_both", "kv_load_failure_policy": policy, **self.config}
        return "--kv-transfer-config", json.dumps(config)


@dataclass(frozen=True)
class Wire:
    """One way: how a server beside an agent is wired, maybe by an alias, and how far it is.

    ``ready`` says whether the two of a started side know each other, ``reading`` how many prompts
    a prefill server has begun; ``moved`` grows with each handoff.
    """

    wiring: Callable[[AgentProcess, bool], Wiring]
    ready: Callable[[AgentProcess], bool]
    reading: Callable[[AgentProcess, VllmServer], float]
    moved: Callable[[AgentProcess, VllmServer], float]


def by_kvbus(agent: AgentProcess, alias: bool) -> Wiring:
    """A server beside ``agent``, which need not run yet."""
    return _kvbus({"endpoint": _attach(agent)}, alias)


def by_kvbus_both_ways(one: AgentProcess, other: AgentProcess, options: Options) -> Wiring:
    """A server beside an agent of each kind; ``options`` are about conversations."""
    endpoint = {agent.role: _attach(agent) for agent in (one, other)}
    return _kvbus({"endpoint": endpoint, "bidirectional_kv_xfer": True, **options}, alias=False)


def _kvbus(extra: Options, alias: bool) -> Wiring:
    module = "kvbus.integrations.vllm"
    return Wiring(
        {
            "kv_connector": "NixlConnector" if alias else "KvbusConnector",
            "kv_connector_module_path": f"{module}.nixl" if alias else module,
            "kv_connector_extra_config": extra,
        }
    )


def _attach(agent: AgentProcess) -> str:
    return f"{agent.settings['runtime_dir']}/attach.sock"


def by_nixl_connector(_: AgentProcess, __: bool) -> Wiring:
    """A server with vLLM's own connector; the agent is not used."""
    return Wiring(
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
        {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        },
    )


def read_bytes(agent: AgentProcess, _: VllmServer) -> float:
    """Bytes that a decode agent has read; an offer that is only released moves none.

    It counts them when a fetch ends, which is a little after its engine has the KV.
    """
    wait_until(lambda: not agent.status()["counts"]["fetches"], "its fetches have ended", 60.0)
    return agent.metric("read_bytes_total")


def tokens_from_elsewhere(_: AgentProcess, server: VllmServer) -> float:
    """Tokens that a server has not computed itself, as it counts them."""
    return server.metric("prompt_tokens_by_source_total", source="external_kv_transfer")


WIRES = {
    "kvbus": Wire(
        by_kvbus,
        ready=lambda agent: list(agent.status()["engines"].values()) == [True],
        reading=lambda agent, _: float(agent.status()["counts"]["offers"]),
        moved=read_bytes,
    ),
    "nixl": Wire(
        by_nixl_connector,
        ready=lambda _: True,
        reading=lambda _, server: server.metric("num_requests_running"),
        moved=tokens_from_elsewhere,
    ),
}
