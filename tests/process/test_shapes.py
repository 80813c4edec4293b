"""Engines of any two shapes exchange KV, on each path, and every byte of both is right.

`tests/planning` compares all that is read, in many more shapes, with loops over every element; here
it moves.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import pytest

from kvbus.geometry import GroupSpec, KvLayout
from tests.expected import num_pieces_compared
from tests.memories import Memory
from tests.process.pairs import Case, pairwise_cases
from tests.process.shapes import (
    DEEP,
    FEW_HEADS,
    GROUP,
    LATENT,
    PATHS,
    STATE,
    WINDOW,
    ShapedAgents,
    Side,
    hand_over,
    two_engines,
)

pytestmark = pytest.mark.anyio

MAX_TOKENS, MAX_RANKS = 100, 8
ROLES = ("prefill", "decode")
MODELS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (GROUP,),
    "few heads": (FEW_HEADS,),
    "latent": (LATENT,),
    "deep": (DEEP,),
    "window": (GROUP, WINDOW),
    "state": (GROUP, WINDOW, STATE),
}
ALONE, SEVERAL, RING, UNREGISTERED = "one agent", "two agents", "a ring", "unregistered"
REQUESTS: dict[str, dict[str, Any]] = {
    "whole": {"num_tokens": 71},
    "behind a prefix": {"num_tokens": 71, "first_token": 37},
    "part of an offer": {"num_tokens": 64, "offered": 90},
    "tails alone": {"num_tokens": 90, "only_tails": True},
    "in steps": {"num_tokens": 71, "first_token": 5, "steps": (0, 25, 26, 55)},
    "nothing": {"num_tokens": 71, "first_token": 71},
}
OF_A_SIDE: dict[str, Sequence[Any]] = {
    "tp": (1, 2, 3, 4, 8),
    "pp": (1, 2, 3),
    "block_size": (1, 6, 16, 48, 64),
    "layout": (
        "NHD",
        "HND",
        "cross-layer NHD",
        "dim,token,block,head,kv",
        "head,block,token,layer,dim,kv",
    ),
    "tensors": ("plain", "apart", "padded"),
    "memory": (ALONE, SEVERAL, RING, UNREGISTERED),
}
AXES: dict[str, Sequence[Any]] = {
    "path": PATHS,
    "model": tuple(MODELS),
    "dtype": ("bfloat16", "float32", "float16", "float8_e4m3fn", "int8"),
    **{f"prefill {name}": values for name, values in OF_A_SIDE.items()},
    **{f"decode {name}": values for name, values in OF_A_SIDE.items()},
    "request": tuple(REQUESTS),
    "zero_tail": (False, True),
}


def is_possible(case: Case) -> bool:
    """Whether there are such engines, and they can take this path."""
    staged = [case[f"{role} memory"] == UNREGISTERED for role in ROLES]
    if any(staged) and (case["path"] == "direct" or (staged[1] and case["path"] == "reordered")):
        return False
    if case["model"] == "state" and case["request"] == "part of an offer":
        return False  # a state is that of the last token
    num_layers = sum(len(group.layers) for group in MODELS[case["model"]])
    return all(_is_side(case, role, num_layers) for role in ROLES)


def _is_side(case: Case, role: str, num_layers: int) -> bool:
    tp, pp = case[f"{role} tp"], case[f"{role} pp"]
    if case[f"{role} memory"] == SEVERAL and (tp * pp < 2 or case[f"{role} tensors"] != "plain"):
        return False
    return bool(tp * pp <= MAX_RANKS and pp <= num_layers)


def side_of(case: Case, role: str) -> Side:
    """The prefill or the decode engine of a case."""
    told = {name: case[f"{role} {name}"] for name in OF_A_SIDE}
    layout = told["layout"].removeprefix("cross-layer ")
    memory = Memory(
        KvLayout.parse(layout, cross_layer=layout != told["layout"]),
        apart=told["tensors"] == "apart",
        padding=2 if told["tensors"] == "padded" else 0,
        direct=told["memory"] != UNREGISTERED,
    )
    num_ranks = told["tp"] * told["pp"]
    places = ("01" * num_ranks)[:num_ranks] if told["memory"] == SEVERAL else ""
    return Side(told["tp"], told["pp"], told["block_size"], memory, told["memory"] == RING, places)


CASES = pairwise_cases(AXES, is_possible, seed=0)
CANNOT_MEET: tuple[Case, ...] = (
    {"path": "direct", "prefill memory": UNREGISTERED},
    {"path": "direct", "decode memory": UNREGISTERED},
    {"path": "reordered", "decode memory": UNREGISTERED},
    {"model": "state", "request": "part of an offer"},
    *({"model": name, f"{role} pp": 3} for name in ("full", "few heads") for role in ROLES),
    *(
        {f"{role} memory": SEVERAL, f"{role} tensors": tensors}
        for tensors in ("apart", "padded")
        for role in ROLES
    ),
    *(
        {f"{role} tp": tp, f"{role} pp": pp}
        for tp, pp in ((8, 2), (8, 3), (4, 3), (3, 3))
        for role in ROLES
    ),
)


def test_values_that_never_meet_cannot() -> None:
    met = {
        frozenset([(one, case[one]), (other, case[other])])
        for case in CASES
        for one, other in combinations(AXES, 2)
    }
    apart = {
        frozenset([(one, first), (other, second)])
        for one, other in combinations(AXES, 2)
        for first in AXES[one]
        for second in AXES[other]
    } - met

    assert apart == {frozenset(pair.items()) for pair in CANNOT_MEET}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES.index(case)}-{case['path']}")
async def test_engines_of_any_two_shapes_hand_over(shapes: ShapedAgents, case: Case) -> None:
    await check_handovers(shapes, case)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
async def test_engines_of_many_more_shapes_hand_over(shapes: ShapedAgents, seed: int) -> None:
    for case in pairwise_cases(AXES, is_possible, seed):
        try:
            await check_handovers(shapes, case)
        except Exception as error:
            error.add_note(str(case))
            raise


async def check_handovers(shapes: ShapedAgents, case: Case) -> None:
    """Fail unless every byte arrives, on the path, and all that did was compared."""
    path = case["path"]
    sides = [side_of(case, role) for role in ROLES]
    groups = [_of_dtype(group, case["dtype"]) for group in MODELS[case["model"]]]
    before = num_compared(shapes, path)
    async with two_engines(shapes, path, *sides, groups=groups, max_tokens=MAX_TOKENS) as engines:
        request = {**REQUESTS[case["request"]], "zero_tail": case["zero_tail"]}
        fetched = await hand_over(*engines, **request)
        pieces = num_pieces_compared(*engines, request["num_tokens"], request.get("first_token", 0))

        assert fetched.path == (path if fetched.num_bytes else "")
        compared = num_compared(shapes, path) - before
        is_in_chunks = "steps" in request or case["decode memory"] == RING
        assert compared >= pieces if is_in_chunks else compared == pieces
        await hand_over(*engines, 96, first_token=13)


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_may_begin_and_end_anywhere_in_a_block(
    shapes: ShapedAgents, path: str
) -> None:
    prefill = Side(tp=2, block_size=48)
    decode = Side(tp=3, block_size=32, memory=Memory(KvLayout.parse("HND")))
    edges = [0, 1, 31, 32, 33, 47, 48, 49]
    async with two_engines(shapes, path, prefill, decode) as engines:
        for num_tokens in edges:
            await hand_over(*engines, num_tokens)
            await hand_over(*engines, num_tokens, zero_tail=True)
        for first_token in (*edges, 70, 71):
            await hand_over(*engines, 71, first_token=first_token, zero_tail=True)


@pytest.mark.parametrize(
    "path", [PATHS[0], *(pytest.param(p, marks=pytest.mark.long) for p in PATHS[1:])]
)
async def test_fetch_after_fetch_another_replica_is_read(shapes: ShapedAgents, path: str) -> None:
    async with two_engines(shapes, path, Side(tp=4), Side(), groups=[LATENT]) as engines:
        source, target = engines
        read = []
        for _ in range(4):
            for rank in range(4):  # replicas that differ show by their bits which one was read
                source.views()[rank, 0, "latent"].fill_(rank)
            offer = await source.prefill.offer("r", num_tokens=16, block_ids={"latent": [1]})
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"latent": [2]})
            await fetch.completed()
            await offer.released()
            read.append(set(target.views()[0, 0, "latent"][2].flatten().tolist()))

        assert all(len(holders) == 1 for holders in read)
        assert set.union(*read) == {0, 1, 2, 3}


def _of_dtype(group: GroupSpec, dtype: str) -> GroupSpec:
    return group if group.state else msgspec.structs.replace(group, dtype=dtype)


def num_compared(shapes: ShapedAgents, path: str) -> float:
    """Pieces that the agents of a path have found equal, for themselves and for each other."""
    return sum(agent.metric("digests_total", outcome="equal") for agent in shapes.of(path))
