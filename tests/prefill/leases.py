"""A leased offer of a real engine, and what its reader may ask for."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from kvbus.agent import HOST, LocalEngine
from kvbus.engine import Offer
from kvbus.errors import RequestRefused
from kvbus.geometry import BlockTable, Box, KvPart, canonical_order
from kvbus.protocol import Claim, Confirm, Empty, EngineMemory, Granted, Handshake, Pack, Packed
from tests.engines import Engine
from tests.prefill.inside import PrefillAgent, Reader

NUM_TOKENS = 40
SECRET = 32 * "0"
"""Of what has none."""
TABLE = BlockTable.of([7, 3, 5])
BOX = Box("full", (0, 1), (KvPart.KEY, KvPart.VALUE), 1, 4, 10, 40)


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

    def pack(self, **changes: Any) -> Pack:
        pack = Pack(
            agent_boot=self.agent.boot,
            engine_id=self.source.spec.engine_id,
            memory_id=self.local.memory_id,
            offer_id=self.offer_id,
            epoch=self.epoch,
            rank=0,
            box=BOX,
            order=canonical_order(),
            table=TABLE,
            slot_lease_s=20.0,
            token=self.token,
            access=self.local.access,
        )
        return msgspec.structs.replace(pack, **changes)

    async def packed(self, **changes: Any) -> Packed:
        return await self.reader.ask(self.pack(**changes), Packed)

    async def refusal(self, **changes: Any) -> RequestRefused:
        with pytest.raises(RequestRefused) as refused:
            await self.packed(**changes)
        return refused.value

    def slot(self, packed: Packed) -> torch.Tensor:
        """The bytes of the box."""
        staging = self.agent.runtime.agent.staging.at(HOST)
        slots = range(staging.num_slots)
        (number,) = (slot for slot in slots if staging.address(slot) == packed.address)
        content: torch.Tensor = staging.tensor(number)[: packed.num_bytes]
        return content

    def wanted(self) -> torch.Tensor:
        """What `BOX` holds, token by token, as bytes."""
        views = self.source.views()
        tokens = [([7, 3, 5][at // 16], at % 16) for at in range(BOX.start, BOX.stop)]
        heads = slice(BOX.first_head, BOX.first_head + BOX.num_heads)
        rows = [
            torch.stack([views[0, layer, KvPart(part)][at][heads] for at in tokens])
            for layer in BOX.layers
            for part in BOX.parts
        ]
        return torch.stack(rows).contiguous().view(torch.uint8).flatten()

    async def confirm(self) -> None:
        confirm = Confirm(
            agent_boot=self.agent.boot,
            offer_id=self.offer_id,
            epoch=self.epoch,
            token=self.token,
        )
        await self.reader.ask(confirm, Empty)


async def lease(agent: PrefillAgent, source: Engine, reader: Reader) -> tuple[Offer, Case]:
    """An offer, and the lease of it."""
    offer = await source.prefill.offer(
        uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids={"full": [7, 3, 5]}
    )
    claim = Claim(
        agent_boot=agent.boot,
        offer_id=offer.offer_id,
        reader_id="reader",
        lease_s=20.0,
        secret=offer.ticket["secret"],
    )
    granted = await reader.ask(claim, Granted)
    return offer, Case(
        agent, source, reader, offer.offer_id, granted.epoch, offer.ticket["secret"], granted.token
    )


@asynccontextmanager
async def leased(agent: PrefillAgent, source: Engine, reader: Reader) -> AsyncIterator[Case]:
    """An offer, withdrawn in the end."""
    offer, case = await lease(agent, source, reader)
    yield case
    await offer.withdraw()


def handshake(case: Case, **changes: Any) -> Handshake:
    reader = EngineMemory(case.source.spec, tuple(cache.rank for cache in case.source.caches))
    shake = Handshake(
        min_protocol=1,
        max_protocol=1,
        agent_id="decode",
        engine_id=case.source.spec.engine_id,
        reader=reader,
        engine_instance=case.local.instance,
        offer_id=case.offer_id,
        secret=case.secret,
    )
    return msgspec.structs.replace(shake, **changes)
