"""The weights of the demo's transformer: drawn from a seed, the same on every machine.

They are not trained: what counts is that every byte of the cache has a say in the output.

Axes
    query_head    query heads of the model
    dim, latent   ``head_dim`` and ``latent_dim``
    hidden, vocab the residual stream, the logits
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from kvbus.demo.model_config import Attention, ModelConfig
from kvbus.geometry import KvPart

COMPUTE_DTYPE = torch.float64

# Random weights of gain one all but ignore the prompt: attention averages it away and the output
# repeats one token. With these gains each byte of a prompt of 200 changes most tokens after it,
# while no token's share of the attention is so small that a change of its K or V gets lost.
QUERY_GAIN = 2.5
OUTPUT_GAIN = 2.0
DOWN_GAIN = 4.0


@dataclass(frozen=True)
class LayerWeights:
    """Projections of one layer, each [in, out]; the norms' gains are one.

    ``cached`` give what is cached, by part. ``raised``, with MLA, make K and V of the latent:
    each [query_head, latent, dim].
    """

    query: Tensor
    cached: Mapping[KvPart, Tensor]
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    raised: Mapping[KvPart, Tensor]


@dataclass(frozen=True)
class Weights:
    """``embedding`` is [vocab, hidden], ``logits`` [hidden, vocab]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    logits: Tensor

    @classmethod
    def seeded(cls, config: ModelConfig) -> "Weights":
        """The weights of ``config.seed``; same seed, same weights."""
        generator = torch.Generator().manual_seed(config.seed)

        def draw(num_in: int, num_out: int, gain: float = 1.0) -> Tensor:
            """[in, out]; what passes through has its variance times ``gain`` squared."""
            drawn = torch.randn(num_in, num_out, generator=generator, dtype=COMPUTE_DTYPE)
            return drawn * (gain / sqrt(num_in))

        return cls(
            embedding=draw(config.vocab, config.hidden, sqrt(config.vocab)),
            layers=tuple(_layer(config, draw) for _ in range(config.num_layers)),
            logits=draw(config.hidden, config.vocab),
        )


def _layer(config: ModelConfig, draw: Callable[..., Tensor]) -> LayerWeights:
    hidden, inner, num_heads = config.hidden, config.intermediate, config.num_query_heads
    query_width = num_heads * config.head_dim
    raised_parts = (KvPart.KEY, KvPart.VALUE) if config.attention is Attention.MLA else ()
    return LayerWeights(
        query=draw(hidden, query_width, QUERY_GAIN),
        cached={p: draw(hidden, config.cache_heads * config.cache_dim) for p in config.parts},
        output=draw(query_width, hidden, OUTPUT_GAIN),
        gate=draw(hidden, inner),
        up=draw(hidden, inner),
        down=draw(inner, hidden, DOWN_GAIN),
        raised={
            part: draw(config.latent_dim, query_width)
            .view(config.latent_dim, num_heads, config.head_dim)
            .transpose(0, 1)
            .contiguous()
            for part in raised_parts
        },
    )
