"""Engines of any two shapes exchange KV, on each path, and every byte of both is right."""

import msgspec
import pytest

from kvbus.geometry import GroupSpec, KvLayout, KvPart, StatePart, state_group
from tests.e2e.shapes import GROUP, PATHS, Side, hand_over, laid_out, two_engines
from tests.memories import Memory

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("path", PATHS)]

NHD, HND = KvLayout.parse("NHD"), KvLayout.parse("HND")
TP_SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (2, 3), (6, 4), (4, 6), (8, 1), (1, 8)]
FEW_HEADS = msgspec.structs.replace(GROUP, num_kv_heads=2)
LATENT = GroupSpec("latent", (0, 1, 2), 16, 1, 24, "bfloat16", (KvPart.LATENT,))
DEEP = msgspec.structs.replace(GROUP, layers=tuple(range(7)), num_kv_heads=2)
WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
GROUPS = (GROUP, WINDOW, STATE)

LAYOUTS = {
    "NHD-HND": (laid_out("NHD"), laid_out("HND")),
    "HND-NHD": (laid_out("HND"), laid_out("NHD")),
    "cross-per_layer": (laid_out("NHD", cross_layer=True), laid_out("NHD")),
    "per_layer-cross": (laid_out("HND"), laid_out("NHD", cross_layer=True)),
    "kv_first-NHD": (laid_out("kv,block,token,head,dim"), laid_out("NHD")),
    "HND-layer_first": (laid_out("HND"), laid_out("layer,kv,block,token,head,dim")),
    "dim_outside-NHD": (laid_out("dim,token,block,head,kv"), laid_out("NHD")),
    "NHD-head_first": (laid_out("NHD"), laid_out("head,block,token,layer,dim,kv")),
    "apart-together": (Side(memory=Memory(NHD, apart=True)), Side(memory=Memory(HND))),
    "together-apart": (Side(memory=Memory(NHD)), Side(memory=Memory(NHD, apart=True))),
    "padded-plain": (Side(memory=Memory(NHD, padding=2)), Side(memory=Memory(HND))),
    "plain-padded": (Side(memory=Memory(NHD)), Side(memory=Memory(NHD, padding=1))),
    "padded-padded": (
        Side(memory=Memory(HND, apart=True, padding=4)),
        Side(memory=Memory(KvLayout.parse("NHD", cross_layer=True), padding=2)),
    ),
}


@pytest.mark.parametrize("tp_sizes", TP_SIZES, ids=lambda sizes: f"tp{sizes[0]}-{sizes[1]}")
async def test_any_tensor_parallelism_reads_from_any_other(shapes, path, tp_sizes):
    prefill, decode = (Side(tp=tp) for tp in tp_sizes)
    async with two_engines(shapes, path, prefill, decode) as (source, target):
        fetched = await hand_over(source, target, 71)

        assert fetched.path == path


@pytest.mark.parametrize(
    "tp_sizes", [(4, 1), (1, 4), (4, 4), (3, 4), (8, 3)], ids=lambda s: f"tp{s[0]}-{s[1]}"
)
@pytest.mark.parametrize("group", [FEW_HEADS, LATENT], ids=lambda group: group.name)
async def test_ranks_without_a_head_of_their_own_hold_replicas(shapes, path, group, tp_sizes):
    prefill, decode = (Side(tp=tp) for tp in tp_sizes)
    async with two_engines(shapes, path, prefill, decode, groups=[group]) as (source, target):
        fetched = await hand_over(source, target, 50, first_token=3)

        assert fetched.path == path


@pytest.mark.parametrize("group", [FEW_HEADS, LATENT], ids=lambda group: group.name)
async def test_fetch_after_fetch_another_replica_is_read(shapes, path, group):
    sides = Side(tp=4), Side(tp=1)
    async with two_engines(shapes, path, *sides, groups=[group]) as (source, target):
        part = group.parts[0]
        read = []
        for _ in range(4):
            for rank in range(4):  # replicas that differ show by their bits which one was read
                source.views()[rank, 0, part].fill_(rank)
            offer = await source.prefill.offer("r", num_tokens=16, block_ids={group.name: [1]})
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={group.name: [2]})
            await fetch.completed()
            await offer.released()
            arrived = target.views()[0, 0, part][2]
            read += [set(arrived[:, head].unique().tolist()) for head in range(arrived.shape[1])]

        assert all(len(holders) == 1 for holders in read)
        assert set.union(*read) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tp_sizes", [(1, 1), (1, 2)], ids=lambda s: f"tp{s[0]}-{s[1]}")
async def test_any_layout_becomes_any_other(shapes, path, name, tp_sizes):
    prefill, decode = (
        with_ranks(side, tp) for side, tp in zip(LAYOUTS[name], tp_sizes, strict=True)
    )
    async with two_engines(shapes, path, prefill, decode) as (source, target):
        fetched = await hand_over(source, target, 71, first_token=5)

        assert fetched.path == path


def with_ranks(side: Side, tp: int) -> Side:
    """The side with so many ranks."""
    return Side(tp, side.pp, side.block_size, side.memory)


BLOCK_SIZES = [(16, 64), (64, 16), (48, 32), (32, 48), (4, 6), (6, 4), (1, 16), (16, 1)]


@pytest.mark.parametrize("sizes", BLOCK_SIZES, ids=lambda sizes: f"{sizes[0]}-{sizes[1]}")
@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("HND", "NHD")], ids="-".join)
async def test_any_block_size_becomes_any_other(shapes, path, sizes, layouts):
    prefill, decode = (
        Side(block_size=size, memory=Memory(KvLayout.parse(layout)))
        for size, layout in zip(sizes, layouts, strict=True)
    )
    async with two_engines(shapes, path, prefill, decode, max_tokens=130) as (source, target):
        await hand_over(source, target, 130)
        await hand_over(source, target, 101, first_token=37, offered=117)


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (48, 32)], ids=lambda s: f"{s[0]}-{s[1]}")
async def test_no_token_is_lost_or_made_up_at_the_edge_of_a_block(shapes, path, sizes):
    prefill, decode = (Side(block_size=size) for size in sizes)
    async with two_engines(shapes, path, prefill, decode, max_tokens=100) as (source, target):
        for num_tokens in (0, 1, *(edge + more for edge in sorted(sizes) for more in (-1, 0, 1))):
            await hand_over(source, target, num_tokens)
            await hand_over(source, target, num_tokens, zero_tail=True)


async def test_a_prefix_hit_may_end_at_any_token(shapes, path):
    prefill = Side(tp=2, block_size=48)
    decode = Side(tp=3, block_size=32, memory=Memory(HND))
    async with two_engines(shapes, path, prefill, decode) as (source, target):
        for first_token in (0, 1, 15, 16, 17, 31, 47, 48, 49, 70, 71):
            await hand_over(source, target, 71, first_token=first_token, zero_tail=True)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Side(pp=1), Side(pp=2)),
        (Side(pp=2), Side(pp=1)),
        (Side(pp=2), Side(pp=4)),
        (Side(pp=4), Side(pp=3)),
        (Side(pp=3, tp=2), Side(pp=2, tp=1)),
        (Side(pp=2, memory=Memory(KvLayout.parse("HND", cross_layer=True))), Side(pp=3, tp=2)),
    ],
    ids=lambda side: f"pp{side.pp}tp{side.tp}",
)
async def test_pipeline_stages_are_matched_layer_by_layer(shapes, path, prefill, decode):
    async with two_engines(shapes, path, prefill, decode, groups=[DEEP]) as (source, target):
        fetched = await hand_over(source, target, 60, first_token=2)

        assert fetched.path == path


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Side(), Side()),
        (Side(tp=2), Side(tp=3)),
        (Side(tp=3), Side(tp=2, memory=Memory(HND))),
        (Side(tp=1, pp=3), Side(tp=2, pp=2)),
        (Side(tp=8), Side(tp=1, memory=Memory(NHD, padding=2))),
    ],
    ids=lambda side: f"pp{side.pp}tp{side.tp}",
)
@pytest.mark.parametrize("only_tails", [False, True], ids=["all_kept", "tails_kept"])
async def test_windows_move_their_tail_and_states_their_bytes(
    shapes, path, prefill, decode, only_tails
):
    async with two_engines(shapes, path, prefill, decode, groups=GROUPS) as (source, target):
        for num_tokens, first_token in ((71, 0), (71, 60), (13, 0), (21, 4), (22, 0), (71, 71)):
            await hand_over(
                source,
                target,
                num_tokens,
                first_token=first_token,
                only_tails=only_tails,
                zero_tail=num_tokens == 71,
            )


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn", "int8"])
async def test_elements_of_any_size_arrive(shapes, path, dtype):
    group = msgspec.structs.replace(GROUP, dtype=dtype)
    sides = Side(tp=2, memory=Memory(HND)), Side(block_size=24)
    async with two_engines(shapes, path, *sides, groups=[group]) as (source, target):
        await hand_over(source, target, 70, first_token=9)
