"""A leased offer of a real engine, and the requests of its reader."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch

from kvbus import protocol
from kvbus.agent.local_engine import LocalEngine
from kvbus.engine import Offer
from kvbus.errors import RequestRefused
from kvbus.geometry import BlockTable, EngineSpec, KvPart, Tile
from kvbus.protocol import AwaitWork, CheckMemory, Commit, Digest, HandshakeDone, Pack, Packed
from tests.support.engines import Engine
from tests.unit.prefill.inside import PrefillAgent, Reader

NUM_TOKENS = 40
SECRET = 32 * "0"  # the secret, token or credential of what has none
IDS = [7, 3, 5]
TABLE = BlockTable.of(IDS)
TILE = Tile("full", (0, 1), (KvPart.KEY, KvPart.VALUE), 1, 4, 10, 40)
M = TypeVar("M", bound=msgspec.Struct)


def changed(message: M, changes: dict[str, Any]) -> M:
    """The message with other fields; a dotted name is that of a field of a field."""
    for path, value in changes.items():
        name, _, inner = path.partition(".")
        new = msgspec.structs.replace(getattr(message, name), **{inner: value}) if inner else value
        message = msgspec.structs.replace(message, **{name: new})
    return message


@dataclass
class Case:
    """An engine, an offer of it in blocks 7, 3 and 5, and the lease of ``reader``."""

    agent: PrefillAgent
    source: Engine
    reader: Reader
    offer_id: str
    epoch: int
    secret: str = SECRET
    token: str = SECRET

    @property
    def local(self) -> LocalEngine:
        return self.agent.local(self.source)

    @property
    def memory(self) -> dict[str, Any]:
        """The fields of a message that name the memory."""
        names = {
            name: getattr(self.local, name) for name in ("engine_id", "memory_id", "rank_secret")
        }
        return {"agent_boot": self.agent.boot, **names}

    @property
    def lease(self) -> dict[str, Any]:
        names = {name: getattr(self, name) for name in ("offer_id", "epoch", "token")}
        return {"agent_boot": self.agent.boot, **names}

    @property
    def right(self) -> dict[str, Any]:
        return {"offer_id": self.offer_id, "secret": self.secret}

    def pack(self, **changes: Any) -> Pack:
        fields = self.memory | self.lease
        pack = Pack(**fields, rank=0, tile=TILE, table=TABLE, slot_lease_s=20.0)
        return changed(pack, changes)

    def digest(self, **changes: Any) -> Digest:
        digest = Digest(**self.memory, **self.right, rank=0, tile=TILE, table=TABLE, one_in=1)
        return changed(digest, changes)

    def check(self, **changes: Any) -> CheckMemory:
        return changed(CheckMemory(**self.memory), changes)

    def await_work(self, **changes: Any) -> AwaitWork:
        return changed(AwaitWork(**self.memory, after=512), changes)

    async def shake(self, **changes: Any) -> HandshakeDone:
        spec, instance = self.source.spec, self.local.instance
        fields: dict[str, Any] = {"engine_id": spec.engine_id, "engine_instance": instance}
        shake = protocol.Handshake(1, 1, "decode", reader=spec, **fields, **self.right)
        return await self.reader.ask(changed(shake, changes))

    async def packed(self, **changes: Any) -> Packed:
        return await self.reader.ask(self.pack(**changes))

    async def refusal(self, **changes: Any) -> RequestRefused:
        try:
            packed = await self.packed(**changes)
        except RequestRefused as refused:
            return refused
        raise AssertionError(packed)

    async def give_back(self, *packed: Packed) -> None:
        slot_ids = tuple(one.slot_id for one in packed)
        await self.reader.ask(protocol.Unpack(agent_boot=self.agent.boot, slot_ids=slot_ids))

    async def ask_check(self, **changes: Any) -> None:
        await self.reader.ask(self.check(**changes))

    async def renew(self, *, nixl_agent: str) -> None:
        renew = protocol.Renew(**self.lease, lease_s=5.0, nixl_agent=nixl_agent)
        await self.reader.ask(renew)

    async def commit(self, **changes: Any) -> None:
        """Commit under the lease."""
        boot = self.agent.boot
        message = Commit(**self.right, agent_boot=boot, reader_id="reader", token=SECRET)
        await self.reader.ask(changed(message, changes))

    def slot(self, packed: Packed) -> torch.Tensor:
        content = self.agent.read(packed.address, packed.num_bytes)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def wanted(self) -> torch.Tensor:
        views = self.source.views()
        tokens = [(IDS[at // 16], at % 16) for at in range(TILE.start, TILE.stop)]
        heads = slice(TILE.first_head, TILE.first_head + TILE.num_heads)
        rows = [
            torch.stack([views[0, layer, KvPart(part)][at][heads] for at in tokens])
            for layer in TILE.layers
            for part in TILE.parts
        ]
        return torch.stack(rows).contiguous().view(torch.uint8).flatten()


async def lease(agent: PrefillAgent, source: Engine, reader: Reader) -> tuple[Offer, Case]:
    name, blocks = uuid.uuid4().hex, {"full": IDS}
    offer = await source.prefill.offer(name, num_tokens=NUM_TOKENS, block_ids=blocks)
    offer_id, secret = offer.offer_id, offer.ticket["secret"]
    right = {"agent_boot": agent.boot, "offer_id": offer_id, "secret": secret}
    granted = await reader.ask(protocol.Acquire(**right, reader_id="reader", lease_s=20.0))
    return offer, Case(agent, source, reader, offer_id, granted.epoch, secret, granted.token)


@asynccontextmanager
async def leased(agent: PrefillAgent, source: Engine, reader: Reader) -> AsyncIterator[Case]:
    offer, case = await lease(agent, source, reader)
    yield case
    await offer.withdraw()


@asynccontextmanager
async def case_of(
    agent: PrefillAgent, spec: EngineSpec | None = None, **shape: Any
) -> AsyncIterator[Case]:
    async with (
        agent.engine(spec, **shape) as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):
        yield case
