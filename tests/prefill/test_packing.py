"""Boxes out of a real engine's memory into real staging slots, and what can come in between.

Axes of a box in canonical order: layer, part, token, head, dim; all as raw bits.
"""

import asyncio
import uuid
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from kvbus.engine import MemorySession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import AxisName, BlockTable, Box, KvPart, SlotOrder
from kvbus.protocol import CheckMemory, Empty, HandshakeDone, Packed, Unpack
from kvbus.transport import ReadOutcome, ReadStatus, Transport
from tests.agents import until
from tests.engines import FULL, NUM_BLOCKS, Engine, make_spec
from tests.memories import NHD
from tests.prefill.inside import PrefillAgent, given_back, prefill_agent
from tests.prefill.leases import SECRET, TABLE, Case, handshake, leased
from tests.strict_sessions import bits

pytestmark = pytest.mark.anyio

HND_OF_32 = SlotOrder(
    (AxisName.BLOCK, AxisName.LAYER, AxisName.KV, AxisName.HEAD, AxisName.TOKEN, AxisName.DIM), 32
)


async def test_a_box_in_canonical_order_holds_its_tokens_one_after_the_other(case: Case) -> None:
    packed = await case.packed()

    assert packed.num_bytes == 2 * 2 * 30 * 4 * FULL.head_dim * 2
    assert torch.equal(case.slot(packed), case.wanted())


async def test_a_box_in_the_order_of_its_reader_holds_its_blocks(case: Case) -> None:
    packed = await case.packed(order=HND_OF_32)

    blocks = case.slot(packed).view(torch.int16).view(2, 2, 2, 4, 32, FULL.head_dim)
    rows = blocks.permute(1, 2, 0, 4, 3, 5).reshape(2, 2, 64, 4, FULL.head_dim)[:, :, 10:40]
    assert torch.equal(rows.contiguous().view(torch.uint8).flatten(), case.wanted())


async def test_a_confirm_frees_the_slots_of_its_lease(case: Case) -> None:
    await case.packed()
    await case.packed()
    in_use = case.agent.counts["slots"]

    await case.confirm()

    assert (in_use, case.agent.counts["slots"]) == (2, 0)


async def test_a_slot_is_free_when_its_reader_has_done_with_it(case: Case) -> None:
    first = await case.packed()

    second = await case.packed(done=(first.slot_id,))
    unpack = Unpack(agent_boot=case.agent.boot, slot_ids=(second.slot_id, first.slot_id))
    in_use = case.agent.counts["slots"]
    await case.reader.ask(unpack, Empty)

    assert second.slot_id != first.slot_id
    assert (in_use, case.agent.counts["slots"]) == (1, 0)


async def test_a_refused_request_still_gives_back_what_its_reader_has_done_with(case: Case) -> None:
    packed = await case.packed()

    await case.refusal(rank=5, done=(packed.slot_id,))

    assert case.agent.counts["slots"] == 0


async def test_another_reader_cannot_give_the_slot_back(case: Case) -> None:
    packed = await case.packed()
    unpack = Unpack(agent_boot=case.agent.boot, slot_ids=(packed.slot_id,))

    async with case.agent.reader() as other:
        await other.ask(unpack, Empty)

    assert case.agent.counts["slots"] == 1


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"agent_boot": "earlier"}, ErrorCode.STALE, "earlier process"),
        ({"engine_id": "another"}, ErrorCode.ENGINE_LOST, "has ended"),
        ({"memory_id": "earlier"}, ErrorCode.STALE, "other memory"),
        ({"epoch": 2}, ErrorCode.STALE, "not live"),
        ({"offer_id": "another"}, ErrorCode.OFFER_UNKNOWN, "no offer"),
        ({"rank": 1}, ErrorCode.GEOMETRY, "rank 1"),
        ({"table": BlockTable.of([7, 3])}, ErrorCode.GEOMETRY, "need 3 blocks"),
        ({"table": BlockTable.of([7, 3, NUM_BLOCKS])}, ErrorCode.GEOMETRY, "out of range"),
        ({"table": BlockTable.of([7, 3, 7])}, ErrorCode.GEOMETRY, "twice"),
        ({"table": BlockTable.of([7, 3, 6])}, ErrorCode.GEOMETRY, "not those of the offer"),
        ({"box.group": "none"}, ErrorCode.GEOMETRY, "no group 'none'"),
        ({"box.layers": (0, 2)}, ErrorCode.GEOMETRY, "layers"),
        ({"box.parts": ("latent",)}, ErrorCode.GEOMETRY, "no part 'latent'"),
        ({"box.num_heads": 6}, ErrorCode.GEOMETRY, "heads 1 to 7"),
        ({"box.stop": 41}, ErrorCode.GEOMETRY, "token 41"),
        ({"box.stop": 10}, ErrorCode.GEOMETRY, "0 blocks"),
        ({"order.block_size": 2**30}, ErrorCode.GEOMETRY, "larger than a slot of 65536 bytes"),
        ({"order.axes": (AxisName.DIM,) * 6}, ErrorCode.GEOMETRY, "six axes"),
    ],
)
async def test_what_is_not_there_is_refused_before_it_has_a_slot(
    case: Case, changes: dict[str, Any], code: ErrorCode, words: str
) -> None:
    wanted = case.pack()
    for path, value in changes.items():
        name, _, inner = path.partition(".")
        changed = {inner: value} if inner else value
        if inner:
            changed = msgspec.structs.replace(getattr(wanted, name), **changed)
        wanted = msgspec.structs.replace(wanted, **{name: changed})

    with pytest.raises(RequestRefused, match=words) as refused:
        await case.reader.ask(wanted, Packed)

    assert refused.value.code is code
    assert case.agent.counts["slots"] == 0


async def test_heads_that_another_rank_holds_are_refused_and_leave_no_slot(
    agent: PrefillAgent,
) -> None:
    async with (
        agent.engine(make_spec(tp=2)) as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):
        refusal = await case.refusal()

        assert refusal.code is ErrorCode.GEOMETRY
        assert case.agent.counts["slots"] == 0


async def test_a_box_is_read_with_nixl_from_the_address_that_the_reader_was_told(
    case: Case,
) -> None:
    done = await case.reader.ask(handshake(case), HandshakeDone)
    packed = await case.packed()
    landed = np.zeros(packed.num_bytes, np.uint8)
    transport = Transport(f"decode/{uuid.uuid4().hex}")
    await asyncio.wrap_future(transport.start())
    try:
        at = landed.ctypes.data
        await asyncio.wrap_future(transport.register(at, landed.size))
        peer = await asyncio.wrap_future(transport.add_peer(done.nixl_metadata[0]))
        rows = [np.array([[a, landed.size, 0]], np.uint64) for a in (at, packed.address)]
        ended: Future[ReadOutcome] = Future()
        transport.read(peer, *rows, on_end=ended.set_result)
        outcome = await asyncio.wrap_future(ended)
    finally:
        await asyncio.wrap_future(transport.close(timeout_s=2.0))

    assert outcome.status is ReadStatus.DONE
    assert torch.equal(torch.from_numpy(landed), case.wanted())


async def test_a_handshake_says_what_the_memory_is_known_by_and_how_large_a_slot_is(
    case: Case,
) -> None:
    done = await case.reader.ask(handshake(case), HandshakeDone)

    assert (done.memory_id, done.slot_bytes, done.others) == (case.local.memory_id, 65536, ())


async def test_a_check_says_whether_the_memory_is_still_that_of_the_handshake(case: Case) -> None:
    check = CheckMemory(
        agent_boot=case.agent.boot,
        engine_id=case.source.spec.engine_id,
        memory_id=case.local.memory_id,
        access=case.local.access,
    )
    earlier = [{"agent_boot": "earlier"}, {"engine_id": "another"}, {"memory_id": "earlier"}]

    await case.reader.ask(check, Empty)
    codes = []
    for change in earlier:
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(msgspec.structs.replace(check, **change), Empty)
        codes.append(refused.value.code)

    assert codes == [ErrorCode.STALE, ErrorCode.ENGINE_LOST, ErrorCode.STALE]


async def test_a_check_has_progress_driven_no_longer_than_a_lease_may_last(folder: Path) -> None:
    async with (
        prefill_agent(folder, max_lease_s=0.1) as agent,
        agent.engine() as source,
        agent.reader() as reader,
    ):
        local = agent.local(source)
        check = CheckMemory(
            agent_boot=agent.boot,
            engine_id=source.spec.engine_id,
            memory_id=local.memory_id,
            access=local.access,
            offer_id="read elsewhere",
            progress_s=86_400,
        )
        before = agent.runtime.transport.stats().progress_tokens

        await reader.ask(check, Empty)

        await until(lambda: agent.runtime.transport.stats().progress_tokens == before)


async def test_ranks_whose_home_is_elsewhere_are_packed_under_the_lease_of_the_slot(
    agent: PrefillAgent,
) -> None:
    spec = make_spec(tp=2)
    async with (
        agent.reader() as reader,
        MemorySession(agent.attach, spec, 1, access=SECRET) as memory,
    ):
        cache = await memory.allocate(NHD, num_blocks=NUM_BLOCKS)
        local = agent.runtime.agent.engines.engines[spec.engine_id]
        processes = list(local.processes)
        bits(cache.view(1, KvPart.KEY)).random_(-(2**15), 2**15)
        here = Engine(spec, memory, [cache], NUM_BLOCKS)  # type: ignore[arg-type] # no control
        case = Case(agent, here, reader, "elsewhere", 3)
        shake = handshake(case, ranks=(1,), access=SECRET)

        done = await reader.ask(shake, HandshakeDone)
        box = Box("full", (1,), (KvPart.KEY,), 3, 3, 0, 40)
        packed = await case.packed(
            memory_id=done.memory_id, rank=1, box=box, slot_lease_s=0.2, table=TABLE
        )
        wanted = bits(cache.view(1, KvPart.KEY))[[7, 3, 5]].reshape(-1, 3, FULL.head_dim)[:40]

        content = case.slot(packed).view(torch.int16).view(40, 3, FULL.head_dim).clone()
        assert torch.equal(content, wanted)
        await until(lambda: not agent.counts["slots"])
    await until(lambda: all(given_back(process) for process in processes))


async def test_an_agent_without_staging_memory_says_so(folder: Path) -> None:
    async with (
        prefill_agent(folder, staging_bytes=0) as agent,
        agent.engine() as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):
        done = await reader.ask(handshake(case), HandshakeDone)
        refusal = await case.refusal()

    assert done.slot_bytes == 0
    assert "'staging_bytes' of its configuration is 0" in refusal.message


def has_packs(case: Case, number: int) -> bool:
    return case.agent.counts["packs"] == number


async def test_an_urgent_box_has_the_next_slot(case: Case) -> None:
    held = [await case.packed(), await case.packed()]  # as many as one lease may have
    order: list[str] = []

    async def ask(name: str, priority: int) -> None:
        packed = await case.packed(priority=priority)
        order.append(name)
        await case.reader.ask(Unpack(agent_boot=case.agent.boot, slot_ids=(packed.slot_id,)))

    async with anyio.create_task_group() as tasks:
        for number, (name, priority) in enumerate([("first", 0), ("second", 0), ("urgent", 1)]):
            tasks.start_soon(ask, name, priority)
            await until(partial(has_packs, case, number + 1))
        await case.reader.ask(Unpack(agent_boot=case.agent.boot, slot_ids=(held[0].slot_id,)))

    assert order == ["urgent", "first", "second"]
