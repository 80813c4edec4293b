"""A handoff, done here by plain copies: it gives the tokens of one engine alone, whatever the shape
of either side, and KV in the wrong place shows.

Axes: block, slot (of a block), token, head, dim.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kvbus.demo.messages import Step
from kvbus.demo.model import Transformer, generate_alone
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.options import EngineShape
from kvbus.demo.paged_cache import gather, write
from kvbus.geometry import BlockTable, KvPart, held_heads
from tests.demo.caches import KINDS, NUM_STEPS, PROMPT, CachedRequest

SMALL_SIZES = {"head_dim": 16, "latent_dim": 24, "hidden": 64, "intermediate": 96}
SMALL = ModelConfig(**SMALL_SIZES)


def move(source: CachedRequest, target: CachedRequest) -> None:
    """Copies what a fetch asks for, head by head, to each rank that holds the head."""
    config = source.model.config
    for group in target.groups:
        start, stop = group.positions(0, len(PROMPT))
        for layer in group.layers:
            whole: dict[tuple[KvPart, int], Tensor] = {}
            ranks = source.kv.ranks_of(layer)
            for tp_rank, views in enumerate(ranks):
                parts = gather(views, source.table(layer), start=start, stop=stop)
                for i, head in enumerate(held_heads(tp_rank, len(ranks), config.cache_heads)):
                    whole |= {(part, head): parts[part][:, i] for part in config.parts}
            ranks = target.kv.ranks_of(layer)
            for tp_rank, views in enumerate(ranks):
                held = held_heads(tp_rank, len(ranks), config.cache_heads)
                parts = {
                    part: torch.stack([whole[part, head] for head in held], dim=1)
                    for part in config.parts
                }
                write(views, target.table(layer), start=start, parts=parts)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(SMALL)


@pytest.fixture(scope="module")
def alone(model: Transformer) -> list[Step]:
    return generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Transformer, list[Step]]:
    model = Transformer(replace(request.param, **SMALL_SIZES))
    return model, generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (EngineShape(), EngineShape()),
        (EngineShape(tp=1, block_size=16), EngineShape(tp=4, block_size=48)),
        (EngineShape(tp=4, block_size=5), EngineShape(tp=6, pp=2, block_size=16)),
        (EngineShape(tp=3, pp=3, block_size=64), EngineShape(tp=2, pp=4, block_size=16)),
        (EngineShape(tp=8, pp=2, block_size=48), EngineShape(tp=1, block_size=32)),
    ],
    ids=["alike", "tp1-4", "tp4-6-pp1-2", "tp3-2-pp3-4", "tp8-1-pp2-1"],
)
def test_decode_after_a_handoff_gives_the_tokens_and_digests_of_one_engine_alone(
    kind: tuple[Transformer, list[Step]], prefill: EngineShape, decode: EngineShape
) -> None:
    model, alone = kind
    source = CachedRequest.shuffled(model, shape=prefill, seed=1)
    target = CachedRequest.shuffled(model, shape=decode, seed=2, tail_only=True)

    first = source.prefill()
    move(source, target)

    assert [first, *target.decode(first)] == alone


def test_decode_without_the_handoff_gives_something_else(
    model: Transformer, alone: list[Step]
) -> None:
    target = CachedRequest.shuffled(model, shape=EngineShape(), seed=2)
    for layer, part in product(range(4), model.config.parts):
        target.view(layer, part).zero_()

    steps = target.decode(alone[0])

    assert [step.token for step in steps] != [step.token for step in alone[1:]]


def test_a_window_has_blocks_for_its_tail_only() -> None:
    model = Transformer(replace(SMALL, window=40))

    target = CachedRequest.shuffled(model, shape=EngineShape(), seed=2, tail_only=True)

    held = {group: (table.first_block, len(table)) for group, table in target.tables.items()}
    assert held == {"full": (0, 13), "window": (10, 3)}


def swap(left: Tensor, right: Tensor) -> None:
    left[:], right[:] = right.clone(), left.clone()


def swap_blocks(engine: CachedRequest) -> None:
    ids = engine.tables["full"].array().tolist()
    ids[3], ids[4] = ids[4], ids[3]
    engine.tables["full"] = BlockTable.of(ids)


def swap_slots_of_one_layer(engine: CachedRequest) -> None:
    block = engine.table(2).array()[5]
    for part in KvPart.KEY, KvPart.VALUE:
        swap(engine.view(2, part)[block, 3], engine.view(2, part)[block, 4])


def swap_heads_of_one_token(engine: CachedRequest) -> None:
    block = engine.table(1).array()[2]
    for part in KvPart.KEY, KvPart.VALUE:
        swap(engine.view(1, part)[block, 0, 0], engine.view(1, part)[block, 0, 1])


def swap_k_and_v_of_one_token(engine: CachedRequest) -> None:
    block = engine.table(3).array()[11]
    swap(engine.view(3, KvPart.KEY)[block, 7], engine.view(3, KvPart.VALUE)[block, 7])


def swap_layers_of_one_token(engine: CachedRequest) -> None:
    block = engine.table(0).array()[0]
    for part in KvPart.KEY, KvPart.VALUE:
        swap(engine.view(0, part)[block, 0], engine.view(1, part)[block, 0])


@pytest.mark.parametrize(
    "misplace",
    [
        swap_blocks,
        swap_slots_of_one_layer,
        swap_heads_of_one_token,
        swap_k_and_v_of_one_token,
        swap_layers_of_one_token,
    ],
)
def test_kv_in_the_wrong_place_changes_the_digests(
    model: Transformer, alone: list[Step], misplace: Callable[[CachedRequest], None]
) -> None:
    engine = CachedRequest.shuffled(model, shape=EngineShape(), seed=1)
    engine.prefill()

    misplace(engine)

    assert engine.decode(alone[0])[0].digest != alone[1].digest
