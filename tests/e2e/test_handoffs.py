"""Random KV goes from a prefill to a decode engine, and every bit of both caches is right."""

import uuid
from itertools import product

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.geometry import KvLayout
from kvbus.protocol import Outcome
from tests.engines import FULL, SMALL, engine, expected_after, make_spec, pair, same

pytestmark = pytest.mark.anyio

LAYOUTS = [
    KvLayout.parse("NHD"),
    KvLayout.parse("HND"),
    KvLayout.parse("kv,block,token,head,dim"),
    KvLayout.parse("NHD", cross_layer=True),
    KvLayout.parse("HND", cross_layer=True),
]


@pytest.mark.parametrize(
    ("layout", "tp"),
    [*product(LAYOUTS, (1, 2, 3))],
    ids=lambda value: "-".join(value.axes) if isinstance(value, KvLayout) else f"tp{value}",
)
async def test_every_bit_arrives_and_no_other_bit_changes(prefill, decode, layout, tp):
    num_tokens = 16 * 5 + 7
    async with pair(prefill.attach, decode.attach, layout=layout, tp=tp) as (source, target):
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        wanted = expected_after(
            target.snapshot(), source, theirs, target, ours, num_tokens=num_tokens
        )

        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
        fetched = await fetch.completed()
        outcome = await offer.released()

        assert same(target.snapshot(), wanted)
        assert outcome is Outcome.COMPLETED
        assert fetched.num_bytes == num_tokens * 2 * 2 * 6 * 8 * 2


async def test_groups_with_different_block_sizes_arrive_together(prefill, decode):
    num_tokens = 37
    async with pair(prefill.attach, decode.attach, groups=(FULL, SMALL)) as (source, target):
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        wanted = expected_after(
            target.snapshot(), source, theirs, target, ours, num_tokens=num_tokens
        )

        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
        await fetch.completed()

        assert same(target.snapshot(), wanted)


@pytest.mark.parametrize("first_token", [16, 32, 21, 47, 1])
async def test_a_prefix_hit_reads_only_the_tokens_behind_it(prefill, decode, first_token):
    num_tokens = 50
    async with pair(prefill.attach, decode.attach, groups=(FULL, SMALL)) as (source, target):
        theirs = source.some_blocks(5, num_tokens)
        ours = target.some_blocks(6, num_tokens, first_token)
        wanted = expected_after(
            target.snapshot(),
            source,
            theirs,
            target,
            ours,
            num_tokens=num_tokens,
            first_token=first_token,
        )

        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=num_tokens, block_ids=ours, first_token=first_token
        )
        await fetch.completed()

        assert same(target.snapshot(), wanted)


@pytest.mark.parametrize(("offered", "fetched_tokens"), [(0, 0), (40, 40)])
async def test_a_fetch_of_nothing_only_releases_the_offer(prefill, decode, offered, fetched_tokens):
    async with pair(prefill.attach, decode.attach) as (source, target):
        before = target.snapshot()

        offer = await source.prefill.offer(
            "r", num_tokens=offered, block_ids=source.some_blocks(5, offered)
        )
        fetch = target.decode.fetch(
            offer.ticket,
            num_tokens=fetched_tokens,
            block_ids={"full": []},
            first_token=fetched_tokens,
        )
        fetched = await fetch.completed()

        assert fetched.num_bytes == 0
        assert await offer.released() is Outcome.COMPLETED
        assert same(target.snapshot(), before)


async def test_a_fetch_may_want_less_than_the_offer_has(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        theirs, ours = source.some_blocks(5, 64), target.some_blocks(6, 30)
        wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=30)

        offer = await source.prefill.offer("r", num_tokens=64, block_ids=theirs)
        await target.decode.fetch(offer.ticket, num_tokens=30, block_ids=ours).completed()

        assert same(target.snapshot(), wanted)


async def test_many_handoffs_at_a_time_do_not_mix(prefill, decode):
    num_requests, num_tokens = 64, 16
    async with pair(prefill.attach, decode.attach) as (source, target):
        theirs, ours = source.some_blocks(5, 16 * 64), target.some_blocks(6, 16 * 64)
        wanted = expected_after(
            target.snapshot(), source, theirs, target, ours, num_tokens=num_requests * num_tokens
        )

        async def one(number: int) -> None:
            mine = {"full": theirs["full"][number : number + 1]}
            yours = {"full": ours["full"][number : number + 1]}
            offer = await source.prefill.offer(str(number), num_tokens=num_tokens, block_ids=mine)
            fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=yours)
            await fetch.completed()
            await offer.released()

        async with anyio.create_task_group() as tasks:
            for number in range(num_requests):
                tasks.start_soon(one, number)

        assert same(target.snapshot(), wanted)


async def test_engines_of_one_agent_do_not_mix(prefill, decode):
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        pair(prefill.attach, decode.attach, groups=(SMALL,), tp=2) as (source_2, target_2),
    ):
        for one, other in ((source, target), (source_2, target_2)):
            theirs, ours = one.some_blocks(5, 33), other.some_blocks(6, 33)
            wanted = expected_after(other.snapshot(), one, theirs, other, ours, num_tokens=33)

            offer = await one.prefill.offer("same id", num_tokens=33, block_ids=theirs)
            await other.decode.fetch(offer.ticket, num_tokens=33, block_ids=ours).completed()

            assert same(other.snapshot(), wanted)


async def test_two_decode_agents_read_from_one_prefill_agent(prefill, decode, other_decode):
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        engine(DecodeSession, other_decode.attach, seed=7) as other_target,
    ):
        theirs = source.some_blocks(5, 100)
        offers = [
            await source.prefill.offer(uuid.uuid4().hex, num_tokens=100, block_ids=theirs)
            for _ in range(2)
        ]
        fetches, wanted = [], []
        for offer, reader in zip(offers, (target, other_target), strict=True):
            ours = reader.some_blocks(6, 100)
            wanted.append(
                expected_after(reader.snapshot(), source, theirs, reader, ours, num_tokens=100)
            )
            fetches.append(reader.decode.fetch(offer.ticket, num_tokens=100, block_ids=ours))

        for fetch in fetches:
            await fetch.completed()

        assert same(target.snapshot(), wanted[0])
        assert same(other_target.snapshot(), wanted[1])


async def test_a_fetch_waits_while_prefill_still_computes(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        theirs, ours = source.some_blocks(5, 50), target.some_blocks(6, 50)
        wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=50)
        offer = await source.prefill.offer(
            "r", num_tokens=20, block_ids={"full": theirs["full"][:2]}, sealed=False
        )
        fetch = target.decode.fetch(offer.ticket, num_tokens=50, block_ids=ours)

        await offer.extend(32)
        await offer.extend(50, {"full": theirs["full"][2:]})
        still_waits = decode.status()["counts"]["fetches"] == 1
        await offer.seal()
        await fetch.completed()

        assert still_waits
        assert same(target.snapshot(), wanted)
        assert await offer.released() is Outcome.COMPLETED


async def test_an_engine_comes_back_under_its_id_and_works(prefill, decode):
    spec = make_spec()
    for seed in (1, 2):
        async with (
            engine(PrefillSession, prefill.attach, spec, seed=seed) as source,
            engine(DecodeSession, decode.attach, seed=7) as target,
        ):
            theirs, ours = source.some_blocks(5, 50), target.some_blocks(6, 50)
            wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=50)

            offer = await source.prefill.offer("r", num_tokens=50, block_ids=theirs)
            await target.decode.fetch(offer.ticket, num_tokens=50, block_ids=ours).completed()

            assert same(target.snapshot(), wanted)
