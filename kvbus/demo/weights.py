"""The weights of the demo's transformer: drawn from a seed, the same on every machine.

They are not trained: what counts is that every byte of the cache has a say in the output.

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


class Weights:
    """The weights of ``config.seed``: ``embedding`` [vocab, hidden], ``logits`` [hidden, vocab]."""

    def __init__(self, config: ModelConfig) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)
        self.embedding = self._draw(config.vocab, config.hidden, sqrt(config.vocab))
        self.layers = [self._layer(config) for _ in range(config.num_layers)]
        self.logits = self._draw(config.hidden, config.vocab)

    def _layer(self, config: ModelConfig) -> LayerWeights:
        hidden, inner = config.hidden, config.intermediate
        query_width = config.num_query_heads * config.head_dim
        cached_width = config.cache_heads * config.cache_dim
        is_latent = config.attention is Attention.MLA
        return LayerWeights(
            query=self._draw(hidden, query_width, QUERY_GAIN),
            cached={part: self._draw(hidden, cached_width) for part in config.parts},
            output=self._draw(query_width, hidden, OUTPUT_GAIN),
            gate=self._draw(hidden, inner),
            up=self._draw(hidden, inner),
            down=self._draw(inner, hidden, DOWN_GAIN),
            raised={part: self._raise(config) for part in (KvPart.KEY, KvPart.VALUE)}
            if is_latent
            else {},
        )

    def _draw(self, num_in: int, num_out: int, gain: float = 1.0) -> Tensor:
        """[in, out]; what passes through has its variance times ``gain`` squared."""
        drawn = torch.randn(num_in, num_out, generator=self._generator, dtype=COMPUTE_DTYPE)
        return drawn * (gain / sqrt(num_in))

    def _raise(self, config: ModelConfig) -> Tensor:
        drawn = self._draw(config.latent_dim, config.num_query_heads * config.head_dim)
        return drawn.view(config.latent_dim, -1, config.head_dim).transpose(0, 1).contiguous()
