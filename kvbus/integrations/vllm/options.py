"""What a user writes into ``kv_connector_extra_config``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from kvbus.errors import ConfigError
from kvbus.protocol.engine import AgentRole

AttachSocket = Annotated[str, msgspec.Meta(min_length=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
SCHEME = "unix://"


class Endpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attach sockets of a vLLM that offers and loads: that of an agent of each kind."""

    prefill: AttachSocket
    decode: AttachSocket


class AgentEndpoint(NamedTuple):
    """Where an agent is; without ``role`` it says itself of which kind it is."""

    path: Path
    role: AgentRole | None


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the connector.

    ``endpoint`` is the attach socket of the agent beside this vLLM, or of both its agents.
    ``model_id`` replaces vLLM's name of the model: both sides must have the same.
    ``attach_timeout_s`` is how long the start waits for the agent before it goes on without.
    ``fetch_timeout_s`` and ``offer_ttl_s`` replace those of the agent's configuration.

    The others are about conversations. Three have the names that vLLM's own connector knows them
    by. Answers that are offered hold ``decoder_kv_blocks_share`` of the cache at most.
    """

    endpoint: AttachSocket | Endpoints
    model_id: str = ""
    attach_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    fetch_timeout_s: Seconds | None = None
    offer_ttl_s: Seconds | None = None
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Seconds = 480.0
    decoder_kv_blocks_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    kv_recompute_threshold: Annotated[int, msgspec.Meta(ge=0)] = 64

    @property
    def agents(self) -> tuple[AgentEndpoint, ...]:
        """The one agent, or that which offers and then that which loads."""
        if isinstance(self.endpoint, str):
            return (AgentEndpoint(_path(self.endpoint), None),)
        return (
            AgentEndpoint(_path(self.endpoint.prefill), AgentRole.PREFILL),
            AgentEndpoint(_path(self.endpoint.decode), AgentRole.DECODE),
        )


def read_options(extra_config: Mapping[str, Any], kv_role: str = "kv_both") -> ConnectorOptions:
    """The options in ``extra_config``; raises `ConfigError` that names the key."""
    try:
        options = msgspec.convert(dict(extra_config), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; it needs 'endpoint', the path of the agent's "
            "attach socket, or one for 'prefill' and one for 'decode', and knows "
            + ", ".join(ConnectorOptions.__struct_fields__)
        ) from error
    _check_roles(options, kv_role)
    return options


def _check_roles(options: ConnectorOptions, kv_role: str) -> None:
    agents = options.agents
    if len(agents) == 1:
        _require(
            not options.bidirectional_kv_xfer,
            "bidirectional_kv_xfer needs both agents beside this vLLM: give endpoint as "
            '{"prefill": "…/attach.sock", "decode": "…/attach.sock"}',
        )
        return
    _require(
        agents[0].path != agents[1].path,
        f"endpoint: prefill and decode are both {agents[0].path}, but an agent is of one kind: "
        "start a kvbus-prefill and a kvbus-decode, each with a runtime_dir of its own",
    )
    _require(
        kv_role == "kv_both",
        f"endpoint names both agents, but kv_role is {kv_role}: set it to kv_both",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"kv_connector_extra_config: {message}")


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix(SCHEME))
