"""Owns what attention does once K and V are at hand: rotation by position, masks, the sum.

Refuses to know where K and V come from: caches are for `kvbus.demo.model`.

Axes
    query_head    query heads of the model
    token         tokens of this step, the last of the request
    context       tokens that this step's may attend to, up to its last
    dim, half     ``head_dim``, and half of it
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from kvbus.demo.model_config import ModelConfig
from kvbus.demo.weights import COMPUTE_DTYPE


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of the rotation of each position, each [max_tokens, half]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, config: ModelConfig) -> "Rope":
        """The rotations of every position that the model has."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=COMPUTE_DTYPE) / config.head_dim
        positions = torch.arange(config.max_tokens, dtype=COMPUTE_DTYPE)
        angles = torch.outer(positions, config.rope_theta**-exponents)
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor, *, first: int) -> Tensor:
        """Turns pairs (i, i + half) of [head, token, dim], tokens from position ``first``."""
        cos, sin = (table[first : first + x.shape[1]] for table in (self.cos, self.sin))
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def first_seen(start: int, window: int | None) -> int:
    """The earliest position that a token at ``start`` attends to."""
    return 0 if window is None else max(0, start - window + 1)


def attend(query: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """Causal attention: [query_head, token, dim] over [query_head, context, dim].

    The tokens are the last ones of the context; each sees ``window`` of them, itself included.
    """
    num_tokens, num_context = query.shape[1], k.shape[1]
    scores = query @ k.transpose(1, 2) / sqrt(query.shape[2])
    token = torch.arange(num_context - num_tokens, num_context).unsqueeze(1)
    context = torch.arange(num_context)
    unseen = context > token
    if window is not None:
        unseen = unseen | (context <= token - window)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v
