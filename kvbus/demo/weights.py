"""Owns the weights of the demo's transformer: drawn from a seed, the same on every machine.

Refuses to be trained: what counts is that every byte of the cache has a say in the output.

Axes
    query_head    query heads of the model
    dim, latent   ``head_dim`` and ``latent_dim``
    hidden, vocab the residual stream, the logits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from kvbus.demo.model_config import ModelConfig
from kvbus.demo.shape import Attention
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


class Seeded:
    """Draws random weights that keep the variance of what passes through them."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def projection(self, num_in: int, num_out: int, gain: float = 1.0) -> Tensor:
        """[in, out]; variance one becomes ``gain`` squared."""
        drawn = torch.randn(num_in, num_out, generator=self._generator, dtype=COMPUTE_DTYPE)
        return drawn * (gain / sqrt(num_in))

    def layer(self) -> LayerWeights:
        """The next layer's."""
        config = self._config
        hidden, inner = config.hidden, config.intermediate
        query_width = config.num_query_heads * config.head_dim
        cache_width = config.cache_heads * config.cache_dim
        return LayerWeights(
            query=self.projection(hidden, query_width, QUERY_GAIN),
            cached={part: self.projection(hidden, cache_width) for part in config.parts},
            output=self.projection(query_width, hidden, OUTPUT_GAIN),
            gate=self.projection(hidden, inner),
            up=self.projection(hidden, inner),
            down=self.projection(inner, hidden, DOWN_GAIN),
            raised=self._raised() if config.attention is Attention.MLA else {},
        )

    def _raised(self) -> dict[KvPart, Tensor]:
        config = self._config
        width = config.num_query_heads * config.head_dim
        return {
            part: self.projection(config.latent_dim, width)
            .view(config.latent_dim, config.num_query_heads, config.head_dim)
            .transpose(0, 1)
            .contiguous()
            for part in (KvPart.KEY, KvPart.VALUE)
        }


@dataclass(frozen=True)
class Weights:
    """``embedding`` is [vocab, hidden], ``logits`` [hidden, vocab]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    logits: Tensor

    @classmethod
    def seeded(cls, config: ModelConfig) -> "Weights":
        """The weights of ``config.seed``; same seed, same weights."""
        draw = Seeded(config)
        return cls(
            embedding=draw.projection(config.vocab, config.hidden, sqrt(config.vocab)),
            layers=tuple(draw.layer() for _ in range(config.num_layers)),
            logits=draw.projection(config.hidden, config.vocab),
        )
