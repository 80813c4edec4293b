"""A leased offer of a real engine, and what its reader may ask for."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch

from kvbus.agent.local_engine import LocalEngine
from kvbus.engine import Offer
from kvbus.errors import RequestRefused
from kvbus.geometry import BlockTable, KvPart, Tile
from kvbus.protocol import (
    Acquire,
    CheckMemory,
    Commit,
    Digest,
    Granted,
    Handshake,
    HandshakeDone,
    Pack,
    Packed,
    Renew,
    Unpack,
)
from tests.support.engines import Engine
from tests.unit.prefill.inside import PrefillAgent, Reader

NUM_TOKENS = 40
SECRET = 32 * "0"
"""Of what has none."""
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
        """What names the memory in a message."""
        local = self.local
        return {
            "agent_boot": self.agent.boot,
            "engine_id": local.engine_id,
            "memory_id": local.memory_id,
            "rank_secret": local.rank_secret,
        }

    def pack(self, **changes: Any) -> Pack:
        pack = Pack(
            **self.memory,
            offer_id=self.offer_id,
            epoch=self.epoch,
            rank=0,
            tile=TILE,
            table=TABLE,
            slot_lease_s=20.0,
            token=self.token,
        )
        return changed(pack, changes)

    def digest(self, **changes: Any) -> Digest:
        digest = Digest(
            **self.memory,
            offer_id=self.offer_id,
            rank=0,
            tile=TILE,
            table=TABLE,
            one_in=1,
            secret=self.secret,
        )
        return changed(digest, changes)

    def check(self, **changes: Any) -> CheckMemory:
        return changed(CheckMemory(**self.memory), changes)

    async def shake(self, **changes: Any) -> HandshakeDone:
        shake = Handshake(
            min_protocol=1,
            max_protocol=1,
            agent_id="decode",
            engine_id=self.source.spec.engine_id,
            reader=self.source.spec,
            engine_instance=self.local.instance,
            offer_id=self.offer_id,
            secret=self.secret,
        )
        return await self.reader.ask(changed(shake, changes))

    async def packed(self, **changes: Any) -> Packed:
        return await self.reader.ask(self.pack(**changes))

    async def refusal(self, **changes: Any) -> RequestRefused:
        """Why there is no such tile."""
        try:
            packed = await self.packed(**changes)
        except RequestRefused as refused:
            return refused
        raise AssertionError(packed)

    async def give_back(self, *packed: Packed) -> None:
        slot_ids = tuple(one.slot_id for one in packed)
        await self.reader.ask(Unpack(agent_boot=self.agent.boot, slot_ids=slot_ids))

    async def ask_check(self, **changes: Any) -> None:
        await self.reader.ask(self.check(**changes))

    async def renew(self, *, nixl_agent: str) -> None:
        renew = Renew(
            agent_boot=self.agent.boot,
            offer_id=self.offer_id,
            epoch=self.epoch,
            lease_s=5.0,
            token=self.token,
            nixl_agent=nixl_agent,
        )
        await self.reader.ask(renew)

    async def take(self, **changes: Any) -> None:
        """Under the lease."""
        take = Commit(
            agent_boot=self.agent.boot,
            offer_id=self.offer_id,
            reader_id="reader",
            secret=self.secret,
            token=SECRET,
        )
        await self.reader.ask(changed(take, changes))

    def slot(self, packed: Packed) -> torch.Tensor:
        """The bytes of the tile."""
        content = self.agent.read(packed.address, packed.num_bytes)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def wanted(self) -> torch.Tensor:
        """What `TILE` holds, token by token, as bytes."""
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
    """An offer, and the lease of it."""
    offer = await source.prefill.offer(
        uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids={"full": IDS}
    )
    secret = offer.ticket["secret"]
    acquire = Acquire(
        agent_boot=agent.boot,
        offer_id=offer.offer_id,
        reader_id="reader",
        lease_s=20.0,
        secret=secret,
    )
    granted: Granted = await reader.ask(acquire)
    return offer, Case(agent, source, reader, offer.offer_id, granted.epoch, secret, granted.token)


@asynccontextmanager
async def leased(agent: PrefillAgent, source: Engine, reader: Reader) -> AsyncIterator[Case]:
    """An offer, withdrawn in the end."""
    offer, case = await lease(agent, source, reader)
    yield case
    await offer.withdraw()
