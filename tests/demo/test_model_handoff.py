"""A handoff, done here by plain copies: it gives the tokens of one engine alone, and any flipped
byte of it shows.

Axes: block, slot (of a block), token, head, dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from kvbus.demo.generate import (
    decode,
    encode,
    generate_alone,
    prefill_prompt,
)
from kvbus.demo.model import Transformer
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import PagedKV
from kvbus.demo.step import Step
from kvbus.geometry import held_heads, num_blocks_for

PROMPT = encode("Every byte of this prompt has a say in what comes after it, in every layer. " * 3)
PROMPT = PROMPT[:200]
NUM_STEPS = 4
NUM_FLIPS = 100


@dataclass(frozen=True)
class Engine:
    """A cache and the blocks that one request has in it."""

    model: Transformer
    kv: PagedKV
    block_ids: list[int]

    @classmethod
    def shuffled(cls, model: Transformer, *, tp: int, block_size: int, seed: int) -> "Engine":
        needed = num_blocks_for(len(PROMPT) + NUM_STEPS, block_size)
        kv = PagedKV.private(model.config, num_blocks=needed + 5, block_size=block_size, tp=tp)
        return cls(model, kv, Random(seed).sample(range(needed + 5), needed))

    def prefill(self) -> Step:
        return prefill_prompt(self.model, self.kv, self.block_ids, prompt=PROMPT)

    def decode(self, first: Step) -> list[Step]:
        return decode(
            self.model,
            self.kv,
            self.block_ids,
            first_token=first.token,
            position=len(PROMPT),
            num_steps=NUM_STEPS,
        )


def move(source: Engine, target: Engine) -> None:
    """Copies K and V of the prompt, head by head, to each rank that holds the head."""
    config = source.model.config
    for layer in range(config.num_layers):
        whole: dict[int, tuple[Tensor, Tensor]] = {}
        for rank in range(source.kv.tp):
            k, v = source.kv.gather(rank, layer, block_ids=source.block_ids, num_tokens=len(PROMPT))
            for i, head in enumerate(held_heads(rank, source.kv.tp, config.num_kv_heads)):
                whole[head] = (k[:, i], v[:, i])
        for rank in range(target.kv.tp):
            held = held_heads(rank, target.kv.tp, config.num_kv_heads)
            k, v = (torch.stack([whole[head][i] for head in held], dim=1) for i in range(2))
            target.kv.write(rank, layer, block_ids=target.block_ids, start=0, k=k, v=v)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(ModelConfig())


@pytest.fixture(scope="module")
def alone(model: Transformer) -> list[Step]:
    return generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.mark.parametrize("tps", [(1, 1), (1, 4), (4, 2), (3, 8), (8, 1)])
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 48), (5, 16)])
def test_decode_after_a_handoff_gives_the_tokens_and_digests_of_one_engine_alone(
    model: Transformer, alone: list[Step], tps: tuple[int, int], block_sizes: tuple[int, int]
) -> None:
    source = Engine.shuffled(model, tp=tps[0], block_size=block_sizes[0], seed=1)
    target = Engine.shuffled(model, tp=tps[1], block_size=block_sizes[1], seed=2)

    first = source.prefill()
    move(source, target)

    assert [first, *target.decode(first)] == alone


def test_decode_without_the_handoff_gives_something_else(
    model: Transformer, alone: list[Step]
) -> None:
    target = Engine.shuffled(model, tp=1, block_size=16, seed=2)

    steps = target.decode(alone[0])

    assert [step.token for step in steps] != [step.token for step in alone[1:]]


def swap(left: Tensor, right: Tensor) -> None:
    left[:], right[:] = right.clone(), left.clone()


def swap_blocks(engine: Engine) -> None:
    ids = engine.block_ids
    ids[3], ids[4] = ids[4], ids[3]


def swap_slots_of_one_layer(engine: Engine) -> None:
    views, block = engine.kv.views[0][2], engine.block_ids[5]
    swap(views.k[block, 3], views.k[block, 4])
    swap(views.v[block, 3], views.v[block, 4])


def swap_heads_of_one_token(engine: Engine) -> None:
    views, block = engine.kv.views[0][1], engine.block_ids[2]
    swap(views.k[block, 0, 0], views.k[block, 0, 1])
    swap(views.v[block, 0, 0], views.v[block, 0, 1])


def swap_k_and_v_of_one_token(engine: Engine) -> None:
    views, block = engine.kv.views[0][3], engine.block_ids[11]
    swap(views.k[block, 7], views.v[block, 7])


def swap_layers_of_one_token(engine: Engine) -> None:
    first, second = engine.kv.views[0][0], engine.kv.views[0][1]
    block = engine.block_ids[0]
    swap(first.k[block, 0], second.k[block, 0])
    swap(first.v[block, 0], second.v[block, 0])


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
    model: Transformer, alone: list[Step], misplace: Callable[[Engine], None]
) -> None:
    engine = Engine.shuffled(model, tp=1, block_size=16, seed=1)
    engine.prefill()

    misplace(engine)

    assert engine.decode(alone[0])[0].digest != alone[1].digest


@pytest.mark.parametrize(
    ("kv_dtype", "tp", "byte"),
    [
        (torch.bfloat16, 1, "lowest"),
        (torch.bfloat16, 8, "lowest"),
        (torch.bfloat16, 8, "highest"),
        (torch.float16, 1, "lowest"),
    ],
)
def test_one_flipped_bit_of_any_used_slot_changes_the_digests(
    kv_dtype: torch.dtype, tp: int, byte: str
) -> None:
    """On 8 ranks each of the 4 KV heads is held twice: each replica counts."""
    engine = Engine.shuffled(
        Transformer(ModelConfig(kv_dtype=kv_dtype)), tp=tp, block_size=16, seed=1
    )
    first = engine.prefill()
    expected = engine.decode(first)
    random = Random(3)

    unnoticed = []
    for _ in range(NUM_FLIPS):
        rank, layer = random.randrange(tp), random.randrange(4)
        view = getattr(engine.kv.views[rank][layer], random.choice("kv"))
        position, head = random.randrange(len(PROMPT)), random.randrange(view.shape[2])
        element = random.randrange(view.shape[3])
        block = engine.block_ids[position // 16]
        at = (block, position % 16, head, 2 * element + (byte == "highest"))
        view.view(torch.uint8)[at] ^= 1
        if engine.decode(first) == expected:
            unnoticed.append((rank, layer, at))
        view.view(torch.uint8)[at] ^= 1

    assert unnoticed == []


def test_a_flipped_bit_of_a_slot_after_the_last_token_changes_nothing(
    model: Transformer, alone: list[Step]
) -> None:
    engine = Engine.shuffled(model, tp=1, block_size=16, seed=1)
    engine.prefill()
    last_block = engine.block_ids[(len(PROMPT) + NUM_STEPS) // 16]
    engine.kv.views[0][0].k.view(torch.uint8)[last_block, 15] ^= 1

    assert engine.decode(alone[0]) == alone[1:]


def test_a_digest_tells_logits_apart_that_choose_the_same_token() -> None:
    logits = torch.tensor([0.5, 2.0, 1.0])
    nudged = torch.nextafter(logits, torch.full_like(logits, 9.0))

    assert Step.greedy(logits).token == Step.greedy(nudged).token == 1
    assert Step.greedy(logits).digest != Step.greedy(nudged).digest
