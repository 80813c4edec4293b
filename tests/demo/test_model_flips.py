"""The cache after a prefill, damaged: a flipped bit that decode reads shows, and no other does."""

from dataclasses import replace
from random import Random

import pytest
import torch

from kvbus.demo.decode_engine import flip_one_byte
from kvbus.demo.messages import Step
from kvbus.demo.model import Transformer, generate_alone, greedy
from kvbus.demo.model_config import Attention, ModelConfig
from kvbus.demo.options import EngineShape
from kvbus.demo.paged_cache import slots
from tests.demo.caches import KINDS, NUM_STEPS, PROMPT, CachedRequest

NUM_FLIPS = 24


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(ModelConfig())


@pytest.fixture(scope="module")
def alone(model: Transformer) -> list[Step]:
    return generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Transformer, list[Step]]:
    model = Transformer(request.param)
    return model, generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.mark.parametrize(
    ("shape", "kv_dtype", "tp", "byte"),
    [
        (ModelConfig(), "bfloat16", 1, "lowest"),
        (ModelConfig(), "bfloat16", 8, "lowest"),
        (ModelConfig(), "bfloat16", 8, "highest"),
        (ModelConfig(), "float16", 1, "lowest"),
        (ModelConfig(kv_heads=6), "bfloat16", 1, "lowest"),
        (ModelConfig(attention=Attention.MLA), "bfloat16", 8, "lowest"),
        (ModelConfig(window=50), "bfloat16", 1, "lowest"),
        (ModelConfig(attention=Attention.MLA, window=50), "bfloat16", 1, "lowest"),
    ],
)
def test_one_flipped_bit_of_any_used_slot_changes_the_digests(
    shape: ModelConfig, kv_dtype: str, tp: int, byte: str
) -> None:
    """On 8 ranks each of the 4 KV heads is held twice, a latent 8 times: each replica counts."""
    config = replace(shape, kv_dtype=kv_dtype)
    engine = CachedRequest.shuffled(Transformer(config), shape=EngineShape(tp=tp), seed=1)
    first = engine.prefill()
    expected = engine.decode(first)
    random = Random(3)

    unnoticed = []
    for _ in range(NUM_FLIPS):
        rank, layer = random.randrange(tp), random.randrange(4)
        part = random.choice(config.parts)
        view = engine.kv.views[rank][layer][part]
        window = config.window_of(layer) or len(PROMPT)
        position = random.randrange(len(PROMPT) - window + 1, len(PROMPT))
        block, slot = slots(engine.table(layer), view, position, position + 1)
        head, element = random.randrange(view.shape[2]), random.randrange(view.shape[3])
        at = (int(block), int(slot), head, 2 * element + (byte == "highest"))
        view.view(torch.uint8)[at] ^= 1
        if engine.decode(first) == expected:
            unnoticed.append((rank, layer, at))
        view.view(torch.uint8)[at] ^= 1

    assert unnoticed == []


def test_the_negative_control_changes_the_digests(kind: tuple[Transformer, list[Step]]) -> None:
    model, alone = kind
    at = CachedRequest.shuffled(model, shape=EngineShape(tp=3), seed=1)
    first = at.prefill()

    outputs = []
    for seed in range(8):
        flip_one_byte(at.generation(), len(PROMPT), Random(seed))
        outputs.append(at.decode(first))
        flip_one_byte(at.generation(), len(PROMPT), Random(seed))  # and back

    assert at.decode(first) == alone[1:]
    assert alone[1:] not in outputs


def test_a_flipped_bit_of_a_slot_after_the_last_token_changes_nothing(
    model: Transformer, alone: list[Step]
) -> None:
    engine = CachedRequest.shuffled(model, shape=EngineShape(), seed=1)
    engine.prefill()
    last_block = engine.table(0).array()[(len(PROMPT) + NUM_STEPS) // 16]
    engine.view(0).view(torch.uint8)[last_block, 15] ^= 1

    assert engine.decode(alone[0]) == alone[1:]


def test_what_a_window_has_left_behind_changes_nothing() -> None:
    """A request's own decode reads no position that its fetch did not ask for."""
    model = Transformer(ModelConfig(window=40))
    engine = CachedRequest.shuffled(model, shape=EngineShape(), seed=1)
    first = engine.prefill()
    expected = engine.decode(first)
    start, stop = 0, len(PROMPT) - 40 + 1

    for layer in (1, 3):
        view = engine.view(layer)
        view[slots(engine.table(layer), view, start, stop)] = torch.nan

    assert engine.decode(first) == expected


def test_a_digest_tells_logits_apart_that_choose_the_same_token() -> None:
    logits = torch.tensor([0.5, 2.0, 1.0])
    nudged = torch.nextafter(logits, torch.full_like(logits, 9.0))

    assert greedy(logits).token == greedy(nudged).token == 1
    assert greedy(logits).digest != greedy(nudged).digest
