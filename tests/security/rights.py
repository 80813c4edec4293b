"""What may be asked of an engine's memory and offers, and what it takes to be answered."""

from typing import Any

import msgspec

from kvbus.protocol import EngineMemory
from tests.agents import AgentProcess
from tests.engines import Engine
from tests.plain_sockets import ask
from tests.security.wire import FORGED

Body = dict[str, Any]
OFFER_KEYS = ("engine_instance", "offer_id", "secret")
"""What a ticket shows of its offer in a handshake."""


def handshake(source: Engine, **right: Any) -> Body:
    """As a decode agent would, of an engine that fits."""
    reader = EngineMemory(source.spec, tuple(cache.rank for cache in source.caches))
    return {
        "min_protocol": 1,
        "max_protocol": 1,
        "agent_id": "stranger",
        "engine_id": source.spec.engine_id,
        "reader": msgspec.to_builtins(reader, builtin_types=(bytes,)),
        **right,
    }


class Leased:
    """An offer that a plain reader has the lease of, and all that this reader knows."""

    def __init__(self, agent: AgentProcess, source: Engine, ticket: Body) -> None:
        shown = {key: ticket[key] for key in OFFER_KEYS}
        done = ask(agent.peer, "handshake", handshake(source, **shown))["ok"]
        self.offer = {key: ticket[key] for key in ("agent_boot", "offer_id")}
        self.memory = {
            "agent_boot": ticket["agent_boot"],
            "engine_id": ticket["engine_id"],
            "memory_id": done["memory_id"],
        }
        claim = {**self.offer, "secret": ticket["secret"], "reader_id": "r", "lease_s": 30.0}
        granted = ask(agent.peer, "claim", claim)["ok"]
        self.lease = {**self.offer, "epoch": granted["epoch"]}
        self.rights = {
            "secret": ticket["secret"],
            "access": done["access"],
            "token": granted["token"],
        }

    @property
    def renewal(self) -> Body:
        return {**self.lease, "token": self.rights["token"], "lease_s": 30.0}

    @property
    def pack(self) -> Body:
        """The box of one token block of a head, with all rights to it."""
        axes = ["layer", "kv", "token", "head", "dim", "block"]
        box = {"group": "full", "layers": [0], "parts": ["k"], "first_head": 0, "num_heads": 1}
        return {
            **self.memory,
            **self.lease,
            "token": self.rights["token"],
            "access": self.rights["access"],
            "rank": 0,
            "box": {**box, "start": 0, "stop": 16},
            "order": {"axes": axes, "block_size": 1},
            "table": {"ids": b"\1\0\0\0"},
            "slot_lease_s": 30.0,
        }

    def requests(self) -> dict[str, tuple[Body, str]]:
        """All that may be asked, and the right to it."""
        return {
            "claim": ({**self.offer, "reader_id": "x", "lease_s": 1e-3}, "secret"),
            "take": ({**self.offer, "reader_id": "x", "token": FORGED, "tables": {}}, "secret"),
            "withdraw": (self.offer, "secret"),
            "renew": ({**self.renewal, "lease_s": 1e-3}, "token"),
            "release": ({**self.lease, "code": "cancelled"}, "token"),
            "check": ({**self.memory, "progress_s": 0.0}, "access"),
            "pack": (self.pack, "access"),
            "pack under another lease": (self.pack, "token"),
        }
