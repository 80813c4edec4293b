"""Owns the names and addresses that agents have when nobody chose others."""

from collections.abc import Mapping
from types import MappingProxyType

PREFILL_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "agent_id": "prefill-0",
        "peer_bind": "tcp://127.0.0.1:7701",
        "events_bind": "tcp://127.0.0.1:7702",
        "http_bind": "127.0.0.1:7703",
    }
)
DECODE_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "agent_id": "decode-0",
        "peer_bind": "tcp://127.0.0.1:7711",
        "events_bind": "tcp://127.0.0.1:7712",
        "http_bind": "127.0.0.1:7713",
    }
)
