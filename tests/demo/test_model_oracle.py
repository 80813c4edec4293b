"""The demo's transformer equals an un-paged one that is written from the definitions alone.

Axes: token, dim (of one head), hidden (the residual stream).
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbus.demo.generate import encode, generate_alone
from kvbus.demo.model import LayerWeights, Transformer
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import PagedKV

PROMPT = encode("The decode engine never reads a prompt")
SMALL = ModelConfig(num_layers=3, head_dim=16, hidden=64, intermediate=96)


def oracle_rotated(x: Tensor, theta: float) -> Tensor:
    """RoPE as complex multiplication: [token, dim] → [token, dim]."""
    half = x.shape[1] // 2
    angles = torch.tensor(
        [[t * theta ** (-i / half) for i in range(half)] for t in range(len(x))],
        dtype=torch.float64,
    )
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def oracle_attention(x: Tensor, weights: LayerWeights, config: ModelConfig) -> Tensor:
    dim, outputs = config.head_dim, []
    for query_head in range(config.num_query_heads):
        head = query_head // config.query_heads_per_kv_head
        q = (x @ weights.query)[:, query_head * dim :][:, :dim]
        q = oracle_rotated(q, config.rope_theta)
        k = (x @ weights.key)[:, head * dim :][:, :dim].to(config.kv_dtype).double()
        k = oracle_rotated(k, config.rope_theta)
        v = (x @ weights.value)[:, head * dim :][:, :dim].to(config.kv_dtype).double()
        rows = []
        for token in range(len(x)):
            weight = torch.exp(k[: token + 1] @ q[token] / math.sqrt(dim))
            rows.append(weight / weight.sum() @ v[: token + 1])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=1) @ weights.output


def oracle_logits(model: Transformer, tokens: list[int]) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    x = model.weights.embedding[tokens]
    for weights in model.weights.layers:
        x = x + oracle_attention(norm(x), weights, model.config)
        gate, up = norm(x) @ weights.gate, norm(x) @ weights.up
        x = x + (gate * torch.sigmoid(gate) * up) @ weights.down
    return (norm(x) @ model.weights.logits)[-1].float()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_paged_prefill_and_decode_equal_an_unpaged_transformer(kv_dtype: torch.dtype) -> None:
    model = Transformer(replace(SMALL, kv_dtype=kv_dtype))
    kv = PagedKV.private(model.config, num_blocks=12, block_size=4, tp=2)
    block_ids = [9, 2, 11, 0, 5, 7, 4, 1, 10, 6]

    prefilled = model.prefill(PROMPT, kv, block_ids)
    decoded = model.decode_step(65, len(PROMPT), kv, block_ids)

    torch.testing.assert_close(prefilled, oracle_logits(model, PROMPT), rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded, oracle_logits(model, [*PROMPT, 65]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens_per_pass", [None, 10])
def test_each_generated_token_is_the_unpaged_transformers_greedy_one(
    tokens_per_pass: int | None,
) -> None:
    small = Transformer(SMALL)

    steps = generate_alone(small, PROMPT, 5, block_size=4, tokens_per_pass=tokens_per_pass)

    tokens = list(PROMPT)
    for step in steps:
        assert step.token == int(oracle_logits(small, tokens).argmax())
        tokens.append(step.token)
