"""The shapes that engines differ in, each by name, against the same plain loops."""

from typing import Any

import numpy as np
import pytest

from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    StatePart,
    state_group,
)
from tests.planning.handoffs import (
    Case,
    Side,
    copied,
    copied_by_loops,
    placed_ranks,
    reads_in,
    runs_in,
    wanted_positions,
    with_equal_replicas,
)

LATENT = (KvPart.LATENT,)
STATE = state_group("state", (3, 4), (StatePart("conv", 1, 5), StatePart("ssm", 6, 4)))


def side(
    base: int,
    tokens: tuple[int, int],
    *,
    tp: int = 1,
    pp: int = 1,
    layout: str = "NHD",
    block: int = 16,
    heads: int = 4,
    parts: tuple[KvPart, ...] = (KvPart.KEY, KvPart.VALUE),
    layers: int = 1,
    window: int | None = None,
    cross_layer: bool = False,
    state: bool = False,
) -> Side:
    """An engine with shuffled blocks and noise for memory."""
    group = GroupSpec("kv", tuple(range(layers)), block, heads, 2, "float16", parts, window)
    engine = EngineSpec("engine", "model", tp, (group, STATE) if state else (group,), pp)
    random = np.random.default_rng(base)
    tables = {}
    for one in engine.groups:
        held = [position // one.block_size for position in wanted_positions(one, *tokens)]
        first, num_blocks = min(held, default=0), len(set(held))
        ids = random.permutation(num_blocks + 2)[:num_blocks]
        tables[one.name] = BlockTable.of(ids, first_block=first)
    axes = KvLayout.parse(layout, cross_layer=cross_layer)
    num_blocks_of = {name: len(table) + 2 for name, table in tables.items()}
    ranks = placed_ranks(engine, axes, num_blocks=num_blocks_of, base=base)
    size_bytes = sum(placed.rank.segments[0].size_bytes for placed in ranks.values())
    empty = Side(engine, ranks, base, tables)
    return with_equal_replicas(empty, random.bytes(size_bytes), *tokens)


def check(start: int, stop: int, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    tokens = (start, stop)
    sides = side(1 << 40, tokens, **prefill), side(7 << 32, tokens, **decode)
    case = Case(*sides, start, stop, replica_index=1)

    reads = case.plan().descriptors(*case.tables, case.spans())

    expected = copied_by_loops(case)
    assert copied(case, reads_in(reads)) == expected
    assert copied(case, runs_in(case.copies())) == expected


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16), (48, 32), (16, 48)])
@pytest.mark.parametrize("stop", [0, 1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 96])
def test_block_sizes_of_any_ratio_and_token_counts_around_their_boundaries(
    blocks: tuple[int, int], stop: int
) -> None:
    for start in {0, stop // 3, max(0, stop - 1)}:
        check(start, stop, {"block": blocks[0], "heads": 1}, {"block": blocks[1], "heads": 1})


TP_SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (2, 3), (6, 4), (4, 6), (8, 1)]


@pytest.mark.parametrize("sizes", TP_SIZES, ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
@pytest.mark.parametrize("heads", [1, 2, 12])
def test_tensor_parallel_sizes_with_fewer_and_with_more_heads_than_ranks(
    sizes: tuple[int, int], heads: int
) -> None:
    check(3, 21, {"tp": sizes[0], "heads": heads}, {"tp": sizes[1], "heads": heads})


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latent": ({"tp": 4, "heads": 1, "parts": LATENT}, {"tp": 2, "heads": 1, "parts": LATENT}),
    "hnd_to_nhd": ({"layout": "HND"}, {}),
    "nhd_to_hnd": ({}, {"layout": "HND"}),
    "per_layer_to_cross_layer": ({}, {"cross_layer": True}),
    "cross_layer_to_per_layer": ({"cross_layer": True}, {"layout": "HND"}),
    "one_tensor_to_k_and_v_apart": ({}, {"layout": "kv,block,token,head,dim"}),
    "stages": ({"pp": 3}, {"pp": 2}),
    "stages_and_ranks": ({"pp": 2, "tp": 3}, {"tp": 2}),
    "window": ({"window": 18, "block": 16}, {"window": 18, "block": 48}),
    "state": ({"state": True, "tp": 2, "pp": 2}, {"state": True, "tp": 3}),
    "all_together": (
        {"state": True, "tp": 3, "pp": 2, "layout": "HND", "block": 48, "window": 40},
        {"state": True, "tp": 2, "pp": 3, "cross_layer": True, "block": 32, "window": 40},
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("tokens", [(0, 0), (0, 1), (0, 49), (7, 48), (47, 48), (33, 95)])
def test_layouts_stages_windows_states_and_all_of_it_together(
    case: str, tokens: tuple[int, int]
) -> None:
    check(*tokens, *({"layers": 3} | shape for shape in OTHERS[case]))
