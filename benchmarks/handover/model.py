"""The random Llama of the benchmark, which has much KV a token and little to compute; its prompts.

Refuses to serve it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCABULARY, HEAD_SIZE, BF16_BYTES = 256, 2048, 128, 2
FIRST_ORDINARY_TOKEN = 3
INITIALIZER_RANGE = 0.08  # less, and the tokens hardly depend on the prompt


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of the KV: every layer has ``num_heads`` KV heads of 128."""

    num_layers: int
    num_heads: int
    element_bytes: int = BF16_BYTES

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return self.num_layers * 2 * self.num_heads * HEAD_SIZE * self.element_bytes


def write_model(folder: Path, shape: ModelShape, *, max_tokens: int) -> None:
    """Write a checkpoint with random weights, the same ones each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=max_tokens,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text(encoding="utf-8"))
    assert written["num_key_value_heads"] == shape.num_heads, written


def answers(folder: Path, prompts: Sequence[str], num_tokens: int) -> list[list[int]]:
    """What the model says to ``prompts``, by transformers, in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = []
    for prompt in prompts:
        given = torch.tensor([json.loads(prompt)])
        options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        tokens = model.generate(given, attention_mask=torch.ones_like(given), **options)
        said.append(tokens[0, given.shape[1] :].tolist())
    return said


class Prompts:
    """JSON lists of random token ids, never the same one twice: no server has a prefix of any.

    Another ``seed`` is another stream.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, num_tokens: int) -> str:
        """The next prompt."""
        return json.dumps(
            [self._random.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY) for _ in range(num_tokens)],
            separators=(",", ":"),
        )

    def several(self, num_prompts: int, num_tokens: int) -> list[str]:
        """The next prompts."""
        return [self.draw(num_tokens) for _ in range(num_prompts)]
