"""What a user writes into ``kv_connector_extra_config``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvbus.errors import ConfigError

Seconds = Annotated[float, msgspec.Meta(gt=0)]
SCHEME = "unix://"


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the connector.

    ``endpoint`` is the attach socket of the agent beside this vLLM. ``model_id`` replaces vLLM's
    name of the model: both sides must have the same. ``attach_timeout_s`` is how long the start
    waits for the agent before it goes on without. ``fetch_timeout_s`` and ``offer_ttl_s`` replace
    those of the agent's configuration.
    """

    endpoint: Annotated[str, msgspec.Meta(min_length=1)]
    model_id: str = ""
    attach_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    fetch_timeout_s: Seconds | None = None
    offer_ttl_s: Seconds | None = None

    @property
    def attach_path(self) -> Path:
        """The attach socket as a path."""
        return Path(self.endpoint.removeprefix(SCHEME))


def read_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """The options in ``extra_config``; raises `ConfigError` that names the key."""
    try:
        return msgspec.convert(dict(extra_config), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; it needs 'endpoint', the path of the agent's "
            "attach socket, and knows " + ", ".join(ConnectorOptions.__struct_fields__)
        ) from error
