"""Tiles and digests of a real engine's memory: right bytes, refusals, and ends during a copy."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import BlockTable, KvPart, Tile
from kvbus.planning import chosen_tiles, num_pieces
from kvbus.protocol import Digests
from tests.support.agents import until
from tests.support.engines import FULL, NUM_BLOCKS, Engine, engine, make_spec, rank_link
from tests.support.memories import Memory
from tests.support.strict_links import StrictLink, bits
from tests.unit.prefill.inside import SETTINGS, PrefillAgent, given_back, prefill_agent
from tests.unit.prefill.leases import IDS, SECRET, TILE, Case, case_of, lease, leased

pytestmark = pytest.mark.anyio


def numbers(told: Digests) -> list[int]:
    found: list[int] = np.frombuffer(told.digests, "<u8").tolist()
    return found


async def test_digests_cover_all_or_expected_tokens_in_memory_now(case: Case) -> None:
    before = numbers(await case.reader.ask(case.digest()))
    case.source.views()[0, 1, "v"][3, 5, 2, 7] ^= 1
    after = numbers(await case.reader.ask(case.digest()))
    some = numbers(await case.reader.ask(case.digest(one_in=3)))
    chosen = chosen_tiles(TILE, offer_id=case.offer_id, one_in=3)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    assert len(after) == num_pieces(TILE)
    assert len(some) == sum(map(num_pieces, chosen)) < len(after)
    assert set(some) <= set(after)


Wrong = tuple[dict[str, Any], ErrorCode, str]
GEOMETRY, STALE, FORBIDDEN = ErrorCode.GEOMETRY, ErrorCode.STALE, ErrorCode.FORBIDDEN
OTHER_MEMORY: list[Wrong] = [
    ({"agent_boot": "earlier"}, STALE, "earlier process"),
    ({"engine_id": "another"}, ErrorCode.ENGINE_LOST, "has ended"),
    ({"memory_id": "earlier"}, STALE, "other memory"),
    ({"rank_secret": SECRET}, FORBIDDEN, "may not request"),
]
OTHER_TILE: list[Wrong] = [
    ({"offer_id": "another"}, ErrorCode.OFFER_UNKNOWN, "no offer"),
    ({"rank": 1}, GEOMETRY, "rank 1"),
    ({"table": BlockTable.of([7, 3])}, GEOMETRY, "need 3 blocks"),
    ({"table": BlockTable.of([7, 3, NUM_BLOCKS])}, GEOMETRY, "out of range"),
    ({"table": BlockTable.of([7, 3, 6])}, GEOMETRY, "not those of the offer"),
    ({"tile.group": "none"}, GEOMETRY, "no group 'none'"),
    ({"tile.layers": (0, 2)}, GEOMETRY, "layers"),
    ({"tile.parts": ("latent",)}, GEOMETRY, "part"),
    ({"tile.num_heads": FULL.num_kv_heads}, GEOMETRY, "heads 1 to 7"),
    ({"tile.stop": 41}, GEOMETRY, "token 41"),
    ({"tile.start": 40}, GEOMETRY, "0 blocks"),
]
WRONG: dict[str, list[Wrong]] = {
    "check": OTHER_MEMORY,
    "await": OTHER_MEMORY,
    "digest": [
        *(*OTHER_MEMORY, *OTHER_TILE),
        ({"secret": SECRET}, FORBIDDEN, "may not request"),
        ({"tile.num_heads": 2**31 - 1}, GEOMETRY, "smaller one"),
    ],
    "pack": [
        *(*OTHER_MEMORY, *OTHER_TILE),
        ({"epoch": 2}, STALE, "not live"),
        ({"token": SECRET}, FORBIDDEN, "may not request"),
        ({"table": BlockTable.of([7, 3, 7])}, GEOMETRY, "twice"),
        ({"tile.num_heads": 2**31 - 1}, GEOMETRY, "larger than a slot of 65536 bytes"),
    ],
}


@pytest.mark.parametrize("question", WRONG)
async def test_request_beyond_readers_right_is_refused(case: Case, question: str) -> None:
    questions: Any = {
        "pack": case.pack,
        "digest": case.digest,
        "check": case.check,
        "await": case.await_work,
    }
    for changes, code, words in WRONG[question]:
        with pytest.raises(RequestRefused, match=words) as refused:
            await case.reader.ask(questions[question](**changes))
        assert refused.value.code is code, changes
        assert case.agent.counts["slots"] == 0, changes


async def test_heads_that_another_rank_holds_are_refused(agent: PrefillAgent) -> None:
    async with case_of(agent, make_spec(tp=2)) as case:
        assert (await case.refusal()).code is ErrorCode.GEOMETRY
        assert agent.counts["slots"] == 0


async def test_digests_need_ready_tokens_of_offer_that_is_not_over(case: Case) -> None:
    offer = await case.source.prefill.offer(
        "open", num_tokens=20, block_ids={"full": [1, 2]}, sealed=False
    )
    table, secret = BlockTable.of([1, 2]), offer.ticket["secret"]
    own = {"offer_id": offer.offer_id, "secret": secret, "table": table, "tile.stop": 20}
    ready = await case.reader.ask(case.digest(**own))
    with pytest.raises(RequestRefused) as early:
        await case.reader.ask(case.digest(**own | {"tile.stop": 21}))
    await offer.withdraw()
    await case.commit()
    with pytest.raises(RequestRefused) as late:
        await case.reader.ask(case.digest())
    assert len(numbers(ready)) == num_pieces(msgspec.structs.replace(TILE, stop=20))
    assert early.value.code is ErrorCode.GEOMETRY
    assert late.value.code is ErrorCode.OFFER_COMPLETED


async def test_another_engines_offer_opens_nothing(case: Case) -> None:
    async with case.agent.engine() as other, leased(case.agent, other, case.reader) as theirs:
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(case.digest(**theirs.memory))
    assert refused.value.code is ErrorCode.FORBIDDEN


async def test_slots_are_freed_by_their_reader_whatever_else_it_asks(case: Case) -> None:
    def in_use() -> int:
        return case.agent.counts["slots"]

    first = await case.packed()
    assert first.num_bytes == 2 * 2 * 30 * 4 * FULL.head_dim * 2
    assert torch.equal(case.slot(first), case.wanted())
    second = await case.packed(done=(first.slot_id,))
    assert (in_use(), second.slot_id != first.slot_id) == (1, True)
    async with case.agent.reader() as other:
        await Case(case.agent, case.source, other, "", 0).give_back(second)
    assert in_use() == 1
    await case.refusal(rank=5, done=(second.slot_id,))
    assert in_use() == 0
    await case.packed()
    third = await case.packed()
    await case.give_back(first, third)
    assert in_use() == 1
    await case.commit()
    assert in_use() == 0


async def test_check_drives_progress_no_longer_than_longest_lease(folder: Path) -> None:
    async with (
        prefill_agent(folder, max_lease_s=0.1) as agent,
        agent.engine() as source,
        agent.reader() as reader,
    ):
        case = Case(agent, source, reader, "", 0)
        before = agent.runtime.agent.data.num_progress
        await case.ask_check(offer_id="read elsewhere", progress_s=86_400)
        await until(lambda: agent.runtime.agent.data.num_progress == before)


async def test_ranks_with_home_elsewhere_are_packed_under_slot_lease(agent: PrefillAgent) -> None:
    spec = make_spec(tp=2)
    rank, cache = rank_link(agent.attach, spec, 1, rank_secret=SECRET)
    async with agent.reader() as reader, rank:
        view = bits(cache.view(1, KvPart.KEY)).random_(-(2**15), 2**15)
        here = Engine(spec, StrictLink(agent.attach, spec), [cache], NUM_BLOCKS)
        case = Case(agent, here, reader, "elsewhere", 3)
        processes = list(case.local.processes)
        done = await case.shake(ranks=(1,), rank_secret=SECRET)
        tile = Tile("full", (1,), (KvPart.KEY,), 3, 3, 0, 40)
        packed = await case.packed(memory_id=done.memory_id, rank=1, tile=tile, slot_lease_s=0.2)
        content = case.slot(packed).view(torch.int16).view(40, 3, FULL.head_dim)
        assert torch.equal(content, view[IDS].reshape(-1, 3, FULL.head_dim)[:40])
        await until(lambda: not agent.counts["slots"])
    await until(lambda: all(given_back(process) for process in processes))


@pytest.mark.parametrize(
    ("memory", "settings", "is_wiped"),
    [
        (Memory(direct=False), {"late_read_s": 86_400}, False),
        (Memory(), {"exposure": "staging"}, True),
    ],
    ids=["unregistered", "exposed by its agent only through slots"],
)
async def test_nixl_knows_only_slots_if_memory_is_not_read_directly(
    folder: Path, memory: Memory, settings: dict[str, Any], is_wiped: bool
) -> None:
    """And its end does not wait for late reads, which the end of the engine would see here."""
    async with prefill_agent(folder, **settings) as agent, case_of(agent, memory=memory) as case:
        done, packed = await case.shake(), await case.packed()
        assert torch.equal(case.slot(packed), case.wanted())
        await case.give_back(packed)
        await until(lambda: agent.counts["slots"] == 0)
        assert (done.memory_id, done.slot_bytes) == (case.local.memory_id, SETTINGS["slot_bytes"])
        assert (done.memory.addresses, done.remote_ranks) == (({},), ())
        staging, engines = agent.runtime.agent.staging, agent.runtime.agent.engines
        assert (staging.registered_bytes, engines.registered_bytes) == (4 * 65536, 0)
        assert bool(case.slot(packed).any()) is not is_wiped


@contextmanager
def held_up(agent: PrefillAgent) -> Iterator[Callable[[], None]]:
    """Stop the data process: its jobs end only after a call of the yielded function."""
    pid = agent.data_pid
    os.kill(pid, signal.SIGSTOP)
    go_on = partial(os.kill, pid, signal.SIGCONT)
    try:
        yield go_on
    finally:
        go_on()


async def begun(agent: PrefillAgent) -> None:
    await until(lambda: agent.runtime.agent.data.num_jobs)


async def note_refusal(case: Case, refusals: list[RequestRefused]) -> None:
    refusals.append(await case.refusal())


async def test_digests_are_refused_if_offer_ends_while_they_are_made(case: Case) -> None:
    refusals: list[RequestRefused] = []

    async def ask() -> None:
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(case.digest())
        refusals.append(refused.value)

    with held_up(case.agent) as go_on:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await begun(case.agent)
            await case.commit()
            go_on()
    assert refusals[0].code is ErrorCode.OFFER_COMPLETED


async def test_digests_of_an_engine_that_ends_are_refused_for_that(agent: PrefillAgent) -> None:
    """The end of the engine aborts the job, which is not the reason."""
    refusals: list[RequestRefused] = []

    async def request(case: Case) -> None:
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(case.digest())
        refusals.append(refused.value)

    async with agent.reader() as reader, anyio.create_task_group() as tasks:
        with ExitStack() as stack:
            async with engine(agent.attach, seed=1) as source:
                _, case = await lease(agent, source, reader)
                go_on = stack.enter_context(held_up(agent))
                tasks.start_soon(request, case)
                await begun(agent)
            go_on()
    assert refusals[0].code is ErrorCode.ENGINE_LOST


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "unregistered"])
async def test_memory_of_dead_engine_stays_during_copy(agent: PrefillAgent, direct: bool) -> None:
    refusals: list[RequestRefused] = []
    async with agent.reader() as reader, anyio.create_task_group() as tasks:
        with ExitStack() as stack:
            async with engine(agent.attach, memory=Memory(direct=direct), seed=1) as source:
                _, case = await lease(agent, source, reader)
                go_on = stack.enter_context(held_up(agent))
                processes = list(case.local.processes)
                tasks.start_soon(note_refusal, case, refusals)
                await begun(agent)
            await until(lambda: refusals)
            slots, kept = agent.counts["slots"], not any(map(given_back, processes))
            go_on()
        await until(lambda: all(map(given_back, processes)))
        await until(lambda: not agent.counts["slots"])
    assert refusals[0].code is ErrorCode.ENGINE_LOST
    assert (slots, kept) == (1, True)
