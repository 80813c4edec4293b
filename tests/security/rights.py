"""What may be asked of an engine's memory and offers, and what it takes to be answered."""

import uuid
from typing import Any

import msgspec

from kvbus.protocol import EngineMemory
from tests.agents import AgentProcess
from tests.engines import Engine
from tests.plain_sockets import ask
from tests.security.wire import FORGED

Body = dict[str, Any]


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


def pack_of(about: Body, offer_id: str) -> Body:
    box = {"group": "full", "layers": [0], "parts": ["k"], "first_head": 0, "num_heads": 1}
    axes = ["layer", "kv", "token", "head", "dim", "block"]
    return {
        **about,
        "offer_id": offer_id,
        "epoch": 1,
        "token": FORGED,
        "access": FORGED,
        "rank": 0,
        "box": {**box, "start": 0, "stop": 16},
        "order": {"axes": axes, "block_size": 1},
        "table": {"ids": b"\1\0\0\0"},
        "slot_lease_s": 1.0,
    }


def delegate_of(target: Engine, ticket: Body) -> Body:
    """Reads the offer into the engine's first block."""
    table = {"full": {"ids": b"\0\0\0\0"}}
    tokens = {"first_token": 0, "num_tokens": 16, "start": 0, "stop": 16}
    return {
        "fetch_id": uuid.uuid4().hex,
        "engine_id": target.spec.engine_id,
        "access": FORGED,
        "ranks": [0],
        "ticket": dict(ticket),
        "memory_ids": ["x"],
        "epoch": 1,
        "token": FORGED,
        "source": table,
        "target": table,
        **tokens,
        "last": True,
        "zero_tail": False,
        "timeout_s": 5.0,
    }


class Leased:
    """An offer that a plain reader has the lease of, and all that this reader knows."""

    def __init__(self, agent: AgentProcess, source: Engine, ticket: Body) -> None:
        shown = {key: ticket[key] for key in ("engine_instance", "offer_id", "secret")}
        done = ask(agent.peer, "handshake", handshake(source, **shown))["ok"]
        self.offer = {key: ticket[key] for key in ("agent_boot", "offer_id")}
        self.memory = {
            "agent_boot": ticket["agent_boot"],
            "engine_id": ticket["engine_id"],
            "memory_id": done["memory_id"],
        }
        reader = {"reader_id": uuid.uuid4().hex, "lease_s": 30.0}
        granted = ask(agent.peer, "claim", {**self.offer, **reader, "secret": ticket["secret"]})
        self.lease = {**self.offer, "epoch": granted["ok"]["epoch"]}
        self.secret, self.access = ticket["secret"], done["access"]
        self.token = granted["ok"]["token"]

    def requests(self) -> dict[str, tuple[Body, str]]:
        """All that may be asked, and the right to it."""
        pack = {**pack_of(self.memory, self.lease["offer_id"]), **self.lease}
        return {
            "claim": ({**self.offer, "reader_id": "x", "lease_s": 1e-3}, "secret"),
            "take": ({**self.offer, "reader_id": "x", "token": FORGED, "tables": {}}, "secret"),
            "withdraw": (self.offer, "secret"),
            "renew": ({**self.lease, "lease_s": 1e-3}, "token"),
            "confirm": (self.lease, "token"),
            "release": ({**self.lease, "code": "cancelled"}, "token"),
            "check": ({**self.memory, "progress_s": 0.0}, "access"),
            "pack": ({**pack, "token": self.token}, "access"),
            "pack under another lease": ({**pack, "access": self.access}, "token"),
        }

    def rights(self) -> dict[str, str]:
        return {"secret": self.secret, "token": self.token, "access": self.access}
