"""Measures how long the direct path's descriptors take to make, per descriptor.

Run it from the repository's root: ``python benchmarks/planning.py``.
"""

import time
from dataclasses import dataclass

import numpy as np

from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout, lay_out_rank
from kvbus.planning import DirectPlan, PlacedRank, ReadMap, whole_spans

ROUNDS = 9
BASES = {"prefill": 1 << 40, "decode": 1 << 44}
RANK_STRIDE_BYTES = 1 << 38


@dataclass(frozen=True)
class Side:
    """One engine's shape; its block tables are shuffled unless ``in_order``."""

    tp_size: int = 1
    layout: str = "NHD"
    block_size: int = 16
    in_order: bool = False


@dataclass(frozen=True)
class Shape:
    """Two engines of 32 layers with 8 heads of 128 bfloat16, and how many tokens are moved."""

    name: str
    prefill: Side
    decode: Side
    num_tokens: int
    first_token: int = 0


SHAPES = [
    Shape("equal, whole blocks, one layer's K and V a run", Side(), Side(), 500_000),
    Shape("NHD, TP 1 to 2", Side(), Side(2), 8_192),
    Shape("NHD, TP 1 to 2, first and last block partly", Side(), Side(2), 8_201, 3),
    Shape("NHD, TP 2 to 1", Side(2), Side(), 8_192),
    Shape("HND to NHD", Side(layout="HND"), Side(), 2_048),
    Shape("NHD to HND, 16 to 48", Side(), Side(layout="HND", block_size=48), 2_048),
    Shape("NHD, TP 1 to 2, 64 to 16", Side(block_size=64), Side(2), 8_192),
    Shape("NHD, TP 1 to 2, blocks in order", Side(in_order=True), Side(2, in_order=True), 8_192),
    Shape(
        "equal, 16 to 48, blocks in order", Side(in_order=True), Side(1, "NHD", 48, True), 250_000
    ),
]


def placed(side: Side, name: str, num_tokens: int) -> tuple[dict[int, PlacedRank], BlockTable]:
    """The ranks of a side at made-up addresses, and the request's block table."""
    group = GroupSpec("full", tuple(range(32)), side.block_size, 8, 128, "bfloat16")
    engine = EngineSpec(name, "model", side.tp_size, (group,))
    num_blocks = -(-num_tokens // side.block_size)
    layout = KvLayout.parse(side.layout)
    ranks = {
        number: PlacedRank(
            engine,
            lay_out_rank(engine, number, layout, num_blocks=num_blocks),
            {"kv": BASES[name] + number * RANK_STRIDE_BYTES},
        )
        for number in range(side.tp_size)
    }
    order = np.arange(num_blocks)
    if not side.in_order:
        np.random.default_rng(len(name)).shuffle(order)
    return ranks, BlockTable.of(order)


def measure(shape: Shape) -> None:
    """Print one row of the table."""
    prefill, remote = placed(shape.prefill, "prefill", shape.num_tokens)
    decode, local = placed(shape.decode, "decode", shape.num_tokens)
    shares = ReadMap(
        [one.rank for one in prefill.values()], [one.rank for one in decode.values()]
    ).shares()
    start = time.perf_counter()
    plan = DirectPlan(prefill, decode, shares)
    plan_ms = (time.perf_counter() - start) * 1e3
    spans = whole_spans(prefill[0].engine.groups, shape.first_token, shape.num_tokens)
    taken_s = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        found = plan.descriptors({"full": remote}, {"full": local}, spans)
        taken_s.append(time.perf_counter() - start)
    made = plan.num_descriptors(spans)
    median_s = float(np.median(taken_s[1:]))
    print(
        f"{shape.name:<48} {made:>9} {len(found.local):>9} {median_s * 1e3:>8.1f} "
        f"{median_s / made * 1e9:>8.1f} {taken_s[0] * 1e3:>8.1f} {plan_ms:>8.1f}"
    )


def main() -> None:
    """Print the table."""
    print(f"{'':48}      made    merged       ms   ns/made first ms  plan ms")
    for shape in SHAPES:
        measure(shape)


main()
