"""An engine that passes no page of sequence words, as one by a third party may."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvbus.engine import Connection
from kvbus.geometry import lay_out_rank
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import PassSegment, Register
from tests.support.engines import NUM_BLOCKS, make_spec
from tests.support.memories import NHD
from tests.support.strict_links import StrictLink


@asynccontextmanager
async def link_without_page(attach: Path) -> AsyncIterator[StrictLink]:
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=NUM_BLOCKS)
    (described,) = rank.segments
    with SharedSegment(described.size_bytes) as segment:
        async with Connection(attach, spec.engine_id) as connection:
            passed = PassSegment(described.segment_id, segment.size_bytes)
            await connection.pass_memory(passed, segment.fd)
            await connection.request(Register(engine=spec, rank=rank))
            async with StrictLink(attach, spec) as link:
                yield link
